"""Attention back end of the sparse MLA layers: plain torch over the selected tokens.

What: every token, prefill or decode, attends to the rows that the indexer selected, in the latent
space (multi-query form). Why this shape: a decode or verify step gathers the selected rows of each
token; a prefill of many tokens multiplies with all rows of its request and masks, which is less
memory traffic. Both are fp32.

What must stay true: ids in the top-k buffer are positions inside the request, `-1` is padding, and
the cache is `[blocks, block, width]` in the model's dtype, or bytes of `ref.kv_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
)

from glm_exl3.cpu.backends.requests import Requests, requests_of
from glm_exl3.format.kv import VLLM_NAMES, RowLayout, registered_layout
from glm_exl3.ref.attention import masked_mqa, sparse_mqa
from glm_exl3.ref.kv_rows import read_rows, write_rows

GATHER_TOKENS = 16
PREFILL_TOKENS = 128


class SparseMlaBackend(AttentionBackend):
    """Names the parts; see the module docstring."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["float16", *VLLM_NAMES.values()]

    @staticmethod
    def get_name() -> str:
        return "GLM_EXL3_CPU_SPARSE_MLA"

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return SparseMlaBuilder

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        return SparseMlaImpl

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        layout = registered_layout(spec.cache_dtype_str)
        return spec if layout is None else replace(spec, state_content_bytes=layout.row_bytes)


def as_numbers(rows: Tensor, layout: RowLayout | None) -> Tensor:
    """Gathered rows `[..., width]`; those of a layout of bytes read as fp32 `[..., 512]`."""
    return rows if layout is None else read_rows(rows, layout)


@dataclass
class SparseMlaMetadata(AttentionMetadata):
    """One step; the counts are what the common MLA layer asks for: every token is a decode."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    slot_mapping: Tensor
    block_table: Tensor
    requests: Requests


class SparseMlaBuilder(AttentionMetadataBuilder):
    """Keeps the request boundaries of a step on the host."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> SparseMlaMetadata:
        common = common_attn_metadata
        requests = requests_of(common)
        return SparseMlaMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=requests.tokens,
            num_decodes=common.num_reqs,
            num_prefills=0,
            num_decode_tokens=requests.tokens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            requests=requests,
        )


class SparseMlaImpl(MLAAttentionImpl, SharedTopkIndicesBuffer):
    """Writes the latent rows and attends over the selected ones."""

    is_sparse = True

    def __init__(  # noqa: PLR0913, PLR0917 - vLLM constructs it with these names
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        topk_indices_buffer: Tensor | None = None,
        indexer: Any = None,
        **mla: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = mla["kv_lora_rank"]
        self.layout = registered_layout(kv_cache_dtype)
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Nothing to record: one thread runs the layer in order."""

    def do_kv_cache_update(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        *scales: Any,
    ) -> None:
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        rows = kv_c_normed[: slots.numel()]
        if k_pe.shape[-1]:
            rows = torch.cat([rows, k_pe.squeeze(1)[: slots.numel()]], dim=-1)
        written = slots >= 0
        slots, rows = slots[written], rows[written]
        layout = self.layout
        rows = rows.to(kv_cache.dtype) if layout is None else write_rows(rows, layout)
        block = kv_cache.shape[1]
        kv_cache[slots // block, slots % block] = rows

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: SparseMlaMetadata, layer: Any
    ) -> tuple[Tensor, None]:
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        out = queries.new_empty(*queries.shape[:2], self.kv_lora_rank)
        requests = attn_metadata.requests
        for index in range(requests.count):
            rows = slice(requests.starts[index], requests.starts[index + 1])
            if rows.start == rows.stop:
                continue
            self._attend(
                queries[rows],
                self.topk_indices_buffer[rows],
                kv_c_and_k_pe_cache,
                attn_metadata.block_table[index],
                requests.lengths[index],
                out[rows],
            )
        return out, None

    def _attend(  # noqa: PLR0913, PLR0917 - one request's view of the step
        self,
        q: Tensor,
        selected: Tensor,
        cache: Tensor,
        block_row: Tensor,
        length: int,
        out: Tensor,
    ) -> None:
        block = cache.shape[1]
        tokens = q.shape[0]
        if tokens <= GATHER_TOKENS:
            selected = selected[:, : min(length, selected.shape[1])]
            valid = selected >= 0
            safe = selected.clamp_min(0)
            rows = as_numbers(cache[block_row[safe // block], safe % block], self.layout)
            out.copy_(sparse_mqa(q, rows, valid, self.scale, self.kv_lora_rank))
            return
        keys = cache[block_row[: -(-length // block)]].flatten(0, 1)[:length]
        keys = as_numbers(keys, self.layout)
        for start in range(0, tokens, PREFILL_TOKENS):
            part = slice(start, min(tokens, start + PREFILL_TOKENS))
            chosen = selected[part].long()
            mask = torch.zeros(chosen.shape[0], length + 1, dtype=torch.bool)
            mask.scatter_(1, torch.where(chosen >= 0, chosen, length), value=True)
            valid = mask[:, :length]
            out[part] = masked_mqa(q[part], keys, valid, self.scale, self.kv_lora_rank).to(
                out.dtype
            )
