"""vLLM's own pool for the full-size model: its functions on its specs, without weights.

What: the KV cache groups and block of GLM-5.3-Flash as vLLM 0.33 plans them, for any number of
ranks. Why this shape: block size, padding and grouping are taken from vLLM's code, not restated;
only the list of layers is ours. It runs in any process on the CPU platform.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

LAYERS, MLA_EVERY = 45, 4
HEADS, HEAD_DIM, CONV = 64, 128, 4
LATENT, POOL, INDEX_ROW = 512, 16, 132


@dataclass(frozen=True)
class Draft:
    """Attention of the drafter."""

    layers: int = 5
    kv_heads: int = 8
    head_dim: int = 128
    window: int = 2048


@dataclass(frozen=True)
class Case:
    """One configuration of the cache.

    `row_bytes` of one token of one MLA layer and `value_bytes` of one of its 512 numbers; `granule`
    is the kernel block in tokens; `mtp` adds the checkpoint's own draft layer.
    """

    ranks: int = 2
    drafts: int = 7
    row_bytes: int = 656
    value_bytes: int = 1
    state_bytes: int = 4
    granule: int = 1024
    draft: Draft | None = Draft()
    draft_value_bytes: int = 2
    mtp: bool = False
    checkpoints: bool = False
    max_model_len: int = 131072
    in_flight_tokens: int = 16384


@dataclass(frozen=True)
class Pool:
    """What vLLM made of it, per rank."""

    block_tokens: int
    block_bytes: int
    request_blocks: int
    groups: tuple[tuple[str, int], ...]

    @property
    def request_bytes(self) -> int:
        return self.block_bytes * self.request_blocks


def plan(case: Case) -> Pool:
    """Run vLLM's planner for this case."""
    from vllm.v1.core import kv_cache_planning as planning

    tokens, page = _block(case)
    specs = _specs(case, tokens, page)
    config = _config(case, tokens)
    with _default_builder(config):
        groups = planning.get_global_kv_cache_groups(config, [specs])
        block = planning._pool_bytes_per_block(config, groups)
        needed = planning._max_memory_usage_bytes_from_groups(_builder(), config, groups)
        made = planning.get_kv_cache_configs(config, [specs], [needed + block], groups)[0]
    return Pool(
        block_tokens=tokens,
        block_bytes=made.kv_cache_tensors[0].size // made.num_blocks,
        request_blocks=needed // block,
        groups=tuple(
            (type(next(iter(_layers(group.kv_cache_spec)))).__name__, len(group.layer_names))
            for group in groups
        ),
    )


def _layers(spec: Any) -> Any:
    from vllm.v1.kv_cache_interface import iter_layer_specs

    return iter_layer_specs(spec)


def _shapes(case: Case) -> tuple[Any, Any]:
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    shapes = MambaStateShapeCalculator.kda_state_shape(
        tp_world_size=case.ranks,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        conv_kernel_size=CONV,
        num_spec=case.drafts,
    )
    state = torch.float32 if case.state_bytes == 4 else torch.bfloat16  # noqa: PLR2004
    return tuple(shapes), (*[torch.bfloat16] * (len(shapes) - 1), state)


def _block(case: Case) -> tuple[int, int]:
    """Tokens of a block and bytes of a state page, by vLLM's platform code."""
    from types import SimpleNamespace

    import torch
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms.interface import Platform
    from vllm.utils import torch_utils

    shapes, dtypes = _shapes(case)
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: shapes,
        get_mamba_state_dtype_from_config=lambda _: dtypes,
    )
    cache = SimpleNamespace(
        cache_dtype="auto" if case.value_bytes > 1 else "fp8",
        block_size=16,
        mamba_cache_mode="align",
        mamba_block_size=None,
        mamba_page_size_padded=None,
        prefix_match_unit=None,
    )
    config = SimpleNamespace(
        cache_config=cache,
        parallel_config=SimpleNamespace(tensor_parallel_size=case.ranks),
        compilation_config=SimpleNamespace(static_forward_context={}),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            use_mla=True,
            get_num_kv_heads=lambda _: 1,
            get_head_size=lambda: LATENT,
            architecture="Glm5NextForCausalLM",
        ),
    )
    backend = SimpleNamespace(get_supported_kernel_block_sizes=lambda: [case.granule])
    assert torch_utils.STR_DTYPE_TO_TORCH_DTYPE["fp8"].itemsize == 1
    original = ModelRegistry.resolve_model_cls
    try:
        ModelRegistry.resolve_model_cls = lambda *_, **__: (model, "")
        with _current(config):
            Platform._align_hybrid_block_size.__func__(_OnePlatform, config, backend)
    finally:
        ModelRegistry.resolve_model_cls = original
    page = cache.mamba_page_size_padded
    return cache.block_size, page or sum(
        prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
    )


class _OnePlatform:
    """vLLM's platform code asks itself for the back ends of other layers: none here."""

    @staticmethod
    def _find_non_ssm_backends(_config: Any) -> list[Any]:
        return []


@contextmanager
def _current(config: Any) -> Iterator[None]:
    import vllm.config.vllm as module

    original = module.set_current_vllm_config
    try:
        module.set_current_vllm_config = contextmanager(lambda *_, **__: iter([None]))
        yield
    finally:
        module.set_current_vllm_config = original


def _specs(case: Case, tokens: int, page: int) -> dict[str, Any]:
    import torch
    from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        MambaSpec,
        MLAAttentionSpec,
        SparseCacheRole,
    )

    shapes, dtypes = _shapes(case)
    state = MambaSpec(
        block_size=tokens,
        shapes=shapes,
        dtypes=dtypes,
        page_size_padded=page,
        mamba_cache_mode="align",
        num_speculative_blocks=case.drafts,
        num_prefill_checkpoint_blocks=int(case.checkpoints),
        prefill_checkpoint_alignment=16 if case.checkpoints else None,
    )
    rows = align_blocks_to_rows(
        MLAAttentionSpec(
            block_size=tokens,
            num_kv_heads=1,
            head_size=LATENT,
            dtype=torch.uint8 if case.value_bytes == 1 else torch.bfloat16,
            state_content_bytes=case.row_bytes,
        )
    )
    index = MLAAttentionSpec(
        block_size=tokens, num_kv_heads=1, head_size=INDEX_ROW, dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER, tokens_per_state=POOL,
    )  # fmt: skip
    ring = POOL
    while ring < POOL + case.drafts:
        ring *= 2
    tail = CircularBufferSpec(
        block_size=ring, num_kv_heads=2, head_size=HEAD_DIM, head_size_v=0,
        dtype=torch.bfloat16, dcp_sharded=False,
    )  # fmt: skip
    specs: dict[str, Any] = {}
    for layer in range(LAYERS + case.mtp):
        draft = layer == LAYERS
        if layer % MLA_EVERY == MLA_EVERY - 1 or draft:
            specs[f"{layer}.attn"] = replace(rows, is_draft=draft)
            specs[f"{layer}.index"] = replace(index, is_draft=draft)
            specs[f"{layer}.tail"] = replace(tail, is_draft=draft)
        else:
            specs[f"{layer}.kda"] = state
    return specs | _draft_specs(case, tokens)


def _draft_specs(case: Case, tokens: int) -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    specs: dict[str, Any] = {}
    draft = case.draft or Draft(layers=0)
    for layer in range(draft.layers):
        specs[f"draft.{layer}"] = SlidingWindowSpec(
            block_size=tokens,
            num_kv_heads=max(1, draft.kv_heads // case.ranks),
            head_size=draft.head_dim,
            dtype=torch.bfloat16 if case.draft_value_bytes > 1 else torch.uint8,
            sliding_window=draft.window,
            is_draft=True,
        )
    return specs


def _config(case: Case, tokens: int) -> Any:
    from types import SimpleNamespace

    from vllm.v1.kv_cache_interface import KVCacheLayout

    return SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
            mamba_cache_mode="align",
            block_size=tokens,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=0,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(
            max_model_len=case.max_model_len, original_max_model_len=case.max_model_len,
            supports_kv_cache_grouping=False,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, tensor_parallel_size=case.ranks
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=case.in_flight_tokens,
    )  # fmt: skip


def _builder() -> Any:
    from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder

    return DefaultKVCacheConfigBuilder()


@contextmanager
def _default_builder(_config: Any) -> Iterator[None]:
    """vLLM's own builder, whatever the platform would choose."""
    import vllm.v1.core.kv_cache_config_builder as module

    original = module.get_kv_cache_config_builder
    try:
        module.get_kv_cache_config_builder = lambda _: _builder()
        yield
    finally:
        module.get_kv_cache_config_builder = original
