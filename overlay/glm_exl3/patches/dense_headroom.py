"""Leave free what the dense recode frees, when that is asked for.

vLLM gives the KV cache everything that `gpu_memory_utilization` leaves beside weights and
activations, so smaller weights mean a larger cache. On machines whose GPU shares its memory with
the host, that memory may be wanted elsewhere: with GLM_EXL3_DENSE_FREED=host the cache gets what it
would have had with the checkpoint's own weights. Nothing is replaced unless a recode is on.
"""

from __future__ import annotations

from typing import Any

from glm_exl3 import envs
from glm_exl3.log import logger
from glm_exl3.patches.record import Patch

TARGET = "vllm.v1.worker.gpu_worker:Worker.determine_available_memory"
_log = logger(__name__)


def less_freed(available: int, freed: int) -> int:
    """Bytes for the KV cache without what the recode freed."""
    return max(0, available - freed)


def freed_bytes(vllm_config: Any) -> int:
    """What the recode frees on one rank, by the sizes of the recoded matrices."""
    from glm_exl3.quant.config import Exl3Config

    config = vllm_config.quant_config
    if not isinstance(config, Exl3Config):
        return 0
    speculative = vllm_config.speculative_config
    with_mtp = speculative is not None and speculative.method == "mtp"
    hidden_layers = int(vllm_config.model_config.hf_text_config.num_hidden_layers)
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    return config.freed_bytes(ranks, None if with_mtp else hidden_layers)


def apply() -> None:
    """Wrap the worker's measurement where head-room is asked for."""
    if envs.DENSE_FREED.read() != "host" or not envs.dense_recode().active:
        return
    from vllm.v1.worker.gpu_worker import Worker

    measure = Worker.determine_available_memory

    def determine_available_memory(self: Any) -> int:
        available, freed = int(measure(self)), freed_bytes(self.vllm_config)
        kept = less_freed(available, freed)
        _log.info("KV cache gets %d of %d bytes: the dense recode freed %d", kept, available, freed)
        return kept

    Worker.determine_available_memory = determine_available_memory


PATCH = Patch(
    id="dense-headroom",
    summary="memory freed by the dense recode stays free if GLM_EXL3_DENSE_FREED is host",
    targets=(TARGET,),
    stage="import",
    applies_to="==0.33.0",
    fingerprints={"0.33.0": {TARGET: "a9179ea34dd6d5f1"}},
    upstream="none: only this recode knows what it freed",
    remove_when="vLLM can reserve memory beside its share",
    off_switch="GLM_EXL3_PATCH_DENSE_HEADROOM",
    risk="memory: the KV cache is larger or smaller than asked for",
    apply=apply,
)
