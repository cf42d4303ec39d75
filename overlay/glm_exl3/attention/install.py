"""Where the back ends of this package take the place of vLLM's, decided per GPU.

`GLM_EXL3_ATTENTION=auto` uses Triton where vLLM 0.33 has no kernel: attention below SM90 and for
rows that no kernel of vLLM reads, the indexer below SM90 (DeepGEMM begins there). `triton` uses it
everywhere, `vllm` nowhere. vLLM picks among the back ends of a fixed list, so ours is put under a
name of that list; where vLLM's own applies, nothing is registered there.
"""

from __future__ import annotations

from typing import Any

from glm_exl3 import envs
from glm_exl3.format.kv import BF16, FP8, INT8, VLLM_NAMES
from glm_exl3.log import logger

_log = logger(__name__)
_PACKAGE = "glm_exl3.attention.backend."
OWN_NAME = "GLM_TRITON_MLA_SPARSE"
FIRST_WITH_KERNELS = 90


def attention_choice(choice: str, architecture: int, cache_dtype: str) -> str | None:
    """`TritonSparseMla`, `Sm120Rows` or None for vLLM's own, on SM `architecture`."""
    if choice == "vllm":
        return None
    if choice == "triton" or architecture < FIRST_WITH_KERNELS:
        return "TritonSparseMla"
    if cache_dtype == VLLM_NAMES[FP8.name] and architecture // 10 == 12:
        return "Sm120Rows"
    own = {VLLM_NAMES[layout.name] for layout in (FP8, INT8)}
    if architecture // 10 == 12:
        own.add(VLLM_NAMES[BF16.name])
    return "TritonSparseMla" if cache_dtype in own else None


def triton_indexer(choice: str, architecture: int) -> bool:
    """Whether the indexer is ours on SM `architecture`."""
    return choice == "triton" or (choice == "auto" and architecture < FIRST_WITH_KERNELS)


def listed_name(architecture: int) -> str:
    """The name in vLLM's list for this GPU that a back end of ours is put under."""
    return "FLASHINFER_MLA_SPARSE_SM120" if architecture // 10 == 12 else "FLASHMLA_SPARSE"


def architecture() -> int | None:
    """80 for SM80, or None without a CUDA GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    return None if capability is None else int(capability.to_int())


def register_names() -> None:
    """Make the Triton back end known by its own name, for `attention_config.backend_per_kind`.

    A second call changes nothing.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if OWN_NAME not in AttentionBackendEnum.__members__:
        register_backend(OWN_NAME, _PACKAGE + "TritonSparseMla")


def install(vllm_config: Any = None) -> str | None:
    """Register what this GPU and the configuration need; the class put into vLLM's list.

    The indexer's part is the patch `pooled-indexer`.
    """
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    found = architecture()
    config = vllm_config or get_current_vllm_config_or_none()
    if found is None or config is None:
        return None
    dtype = str(config.cache_config.cache_dtype)
    chosen = attention_choice(envs.ATTENTION.read(), found, dtype)
    if chosen is None:
        return None
    replaced = [listed_name(found)]
    if found < 100 and chosen == "TritonSparseMla" and found >= FIRST_WITH_KERNELS:
        replaced = ["FLASHINFER_MLA_SPARSE_SM90", "FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"]
    for name in replaced:
        register_backend(AttentionBackendEnum[name], _PACKAGE + chosen)
    _log.info("sparse attention: %s for %s rows on SM%d", chosen, dtype, found)
    return chosen
