"""The CPU platform: vLLM's own one, with what GLM-5.3-Flash needs beyond it.

What: a subclass of `CpuPlatform` that hands out our attention back ends, keeps chunked prefill and
prefix caching (vLLM turns them off for MLA on CPUs because its own MLA kernel cannot do them) and
leaves out everything that only costs start-up time here: compilation, warm-up, memory profiling.

What must stay true: it is used only when `activation.platform` chose it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

from glm_exl3.cpu import engine, environment

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GIB = 1 << 30
DEFAULT_KV_CACHE_BYTES = GIB
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's CPU platform forces `spawn`, which imports the engine again in every process: with two
ranks that costs four imports of about 6 s of processor time each. Nothing here needs it."""
SPARSE_BACKEND = "glm_exl3.cpu.backends.sparse_mla.SparseMlaBackend"
PAGED_BACKEND = "glm_exl3.cpu.backends.paged.PagedBackend"


class CpuEnginePlatform(CpuPlatform):
    """CPU platform of this plug-in; see the module docstring."""

    ray_device_key = "GPU"
    """Ray nodes of this engine claim one GPU per rank: Ray numbers only what it knows."""

    def __init__(self) -> None:
        super().__init__()
        engine.install(force=True)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_sparse:
            return SPARSE_BACKEND
        if attn_selector_config.use_mla:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        return PAGED_BACKEND

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from vllm.config import CompilationMode, CUDAGraphMode

        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        kept = (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens)
        prefix_caching = cache.enable_prefix_caching
        block_size = cache.block_size
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        start_method = os.environ.get(START_METHOD, "fork")
        super().check_and_update_config(vllm_config)
        os.environ[START_METHOD] = start_method
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = kept
        cache.enable_prefix_caching = prefix_caching
        cache.block_size = block_size if cache.user_specified_block_size else 128
        if cache.kv_cache_memory_bytes is None:
            cache.kv_cache_memory_bytes = DEFAULT_KV_CACHE_BYTES
        vllm_config.kernel_config.enable_jit_warmup = False
        parallel = vllm_config.parallel_config
        environment.prepare_ranks(
            max(1, parallel.world_size // parallel.nnodes), parallel.nnodes, parallel.master_addr
        )

    @classmethod
    def import_kernels(cls) -> None:
        """Define the CPU ops that an accelerator build of vLLM lacks instead of loading its own."""
        from glm_exl3.cpu import ops

        ops.define_missing()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Nothing: the first model runner, whose kernels this overrides, is not used."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False
