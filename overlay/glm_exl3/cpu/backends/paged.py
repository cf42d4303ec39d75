"""Attention back end of ordinary layers (the DFlash2 drafter): plain torch over the paged cache.

Grouped-query attention with an optional sliding window, causal or not, fp32. The cache is
`[blocks, heads, block, 2 * head_size]`, keys first; every block layout of vLLM is accepted because
the rows are addressed by index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from glm_exl3.cpu.backends.requests import Requests, requests_of
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.ref.attention import grouped_query, visible


class PagedBackend(AttentionBackend):
    """Names the parts; see the module docstring."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return PagedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


@dataclass
class PagedMetadata:
    """One step of one cache group."""

    num_actual_tokens: int
    slot_mapping: Tensor
    block_table: Tensor
    requests: Requests
    causal: bool


class PagedBuilder(AttentionMetadataBuilder):
    """Keeps the request boundaries of a step on the host."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagedMetadata:
        common = common_attn_metadata
        return PagedMetadata(
            num_actual_tokens=common.num_actual_tokens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            requests=requests_of(common),
            causal=bool(common.causal),
        )


class PagedImpl(AttentionImpl):
    """Writes keys and values and attends per request."""

    def __init__(  # noqa: PLR0913, PLR0917 - vLLM constructs it with these names
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        unsupported = {"alibi_slopes": alibi_slopes, "logits_soft_cap": logits_soft_cap, **others}
        named = sorted(name for name, value in unsupported.items() if value)
        if named:
            raise GlmExl3Error(
                code="cpu-attention",
                seen=f"A layer asks for attention with {', '.join(named)}.",
                why="The CPU engine has grouped-query attention with a window only.",
                fix="Serve this model on a GPU.",
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype

    def do_kv_cache_update(
        self,
        layer: Any,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *scales: Any,
    ) -> None:
        slots = slot_mapping.flatten()
        written = slots >= 0
        slots = slots[written]
        blocks, rows = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
        for part, offset in ((key, 0), (value, self.head_size)):
            heads = part.view(-1, self.num_kv_heads, self.head_size)[: written.numel()][written]
            columns = slice(offset, offset + self.head_size)
            kv_cache[blocks, :, rows, columns] = heads.to(kv_cache.dtype)

    def forward(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:
            return output.fill_(0)
        requests = attn_metadata.requests
        queries = query.view(-1, self.num_heads, self.head_size)
        out = output.view(-1, self.num_heads, self.head_size)
        for index in range(requests.count):
            rows = slice(requests.starts[index], requests.starts[index + 1])
            length = requests.lengths[index]
            if rows.start < rows.stop and length > 0:
                block_row = attn_metadata.block_table[index]
                out[rows] = self._attend(queries[rows], kv_cache, block_row, length, attn_metadata)
        return output

    def _attend(
        self, q: Tensor, cache: Tensor, block_row: Tensor, length: int, metadata: PagedMetadata
    ) -> Tensor:
        tokens, block = q.shape[0], cache.shape[2]
        first = 0
        if self.window is not None:
            first = max(0, length - tokens - self.window + 1) // block * block
        blocks = block_row[first // block : -(-length // block)].long()
        rows = cache[blocks].transpose(1, 2).flatten(0, 1)[: length - first]
        mask = visible(tokens, length - first, causal=metadata.causal, window=self.window)
        keys, values = rows.split(self.head_size, dim=-1)
        return grouped_query(q, keys, values, mask, self.scale).to(q.dtype)
