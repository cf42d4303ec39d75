"""The indexer operator and its metadata for GPUs without DeepGEMM.

What: a builder that keeps what the kernels need per token, and the operator class that vLLM's
model constructs in place of `SparseAttnIndexerKpool`. Why this shape: one path for prefill, decode
and verify needs neither vLLM's split of a batch nor its flattened copies of block tables.

What must stay true: the request of each token and the slots of the ring lie in buffers that keep
their address, because graphs replay launches on it; positions are required, not optional.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs as vllm_envs
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.models.glm5next.nvidia.sparse_indexer import SparseAttnIndexerKpool
from vllm.utils.torch_utils import _resolve_layer_name
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from glm_exl3.attention import pool_calls
from glm_exl3.attention.pool_calls import Asked, PoolCache, Step
from glm_exl3.format.errors import GlmExl3Error


@dataclass
class PoolMetadata:
    """One step of an indexer cache; block_table `[R, blocks]` in cache pages."""

    block_table: Tensor
    request: Tensor
    query_start: Tensor
    lengths: Tensor
    longest: int
    tokens: int
    num_prefills: int
    num_decodes: int
    num_decode_tokens: int


class PoolBuilder(AttentionMetadataBuilder):
    """Needs no host copy of anything but the sizes."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    reorder_batch_threshold: ClassVar[int | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args)
        config = self.vllm_config
        if config.parallel_config.decode_context_parallel_size > 1:
            raise GlmExl3Error(
                code="indexer-dcp",
                seen="decode context parallelism is on",
                why="the Triton indexer keeps every pool on every rank",
                fix="leave decode_context_parallel_size at 1 on this GPU",
            )
        self.request_buffer = torch.zeros(
            config.scheduler_config.max_num_batched_tokens, dtype=torch.int32, device=self.device
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PoolMetadata:
        common = common_attn_metadata
        return PoolMetadata(
            block_table=common.block_table_tensor,
            request=common.token_to_req_indices(self.request_buffer),
            query_start=common.query_start_loc,
            lengths=common.seq_lens,
            longest=common.max_seq_len,
            tokens=common.num_actual_tokens,
            num_prefills=0,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
        )


def builder_class() -> type[AttentionMetadataBuilder]:
    """What `Glm5NextIndexerBackend.get_builder_cls` returns where this indexer runs."""
    return PoolBuilder


def scratch_bytes() -> int:
    """Bytes that scores may take at a time: vLLM's own limit."""
    return int(vllm_envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB) << 20


def select(scores: Tensor, counts: Tensor, out: Tensor) -> None:
    """vLLM's top-k per row, which its wheel has for every architecture."""
    starts = torch.zeros_like(counts)
    torch.ops._C.top_k_per_row_prefill(
        scores,
        starts,
        counts,
        out,
        scores.shape[0],
        scores.stride(0),
        scores.stride(1),
        out.shape[1],
    )


@eager_break_during_capture
def choose_tokens(
    op: Any, queries: Tensor, k: Tensor, weights: Tensor, gates: Tensor, ape: Tensor, positions: Any
) -> Tensor:
    """Insert the step's keys and fill the top-k buffer; returns the buffer."""
    buffer: Tensor = op.topk_indices_buffer
    every = get_forward_context().attn_metadata
    if not isinstance(every, dict):
        torch.empty(scratch_bytes(), dtype=torch.uint8, device=buffer.device)
        return buffer
    if positions is None:
        raise GlmExl3Error(
            code="indexer-positions",
            seen="a step came without positions",
            why="pools and rings are addressed by them",
            fix="report it with the vLLM version",
        )
    metadata: PoolMetadata = every[_resolve_layer_name(op.k_cache.prefix)]
    tail = every[_resolve_layer_name(op.tail_cache.prefix)]
    n = metadata.tokens
    cache = PoolCache(op.k_cache.kv_cache, metadata.block_table, op.tail_cache.kv_cache)
    cache.check()
    step = Step(
        keys=k[:n],
        gates=gates[:n],
        ape=ape,
        positions=positions[:n],
        request=metadata.request[:n],
        query_start=metadata.query_start,
        lengths=metadata.lengths,
        ring_slots=tail.slot_mapping[:n],
    )
    if not op.skip_k_cache_insert:
        pool_calls.insert(step, cache)
    buffer[n : queries.shape[0]] = -1
    pool_calls.choose(
        Asked(queries[:n], weights[:n]),
        step,
        cache,
        metadata.longest,
        op.topk_tokens,
        scratch_bytes(),
        select,
        buffer[:n],
    )
    return buffer


class TritonPoolIndexer(SparseAttnIndexerKpool):
    """`SparseAttnIndexerKpool` without DeepGEMM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The parent's constructor refuses hosts without DeepGEMM.
        CustomOp.__init__(self)
        names = (
            "k_cache",
            "quant_block_size",
            "scale_fmt",
            "topk_tokens",
            "head_dim",
            "max_pool_len",
            "max_total_seq_len",
            "topk_indices_buffer",
            "skip_k_cache_insert",
            "use_fp4_cache",
            "tail_cache",
        )
        given = dict(zip(names, args, strict=False)) | kwargs
        self.k_cache, self.tail_cache = given["k_cache"], given["tail_cache"]
        self.topk_tokens = given["topk_tokens"]
        self.topk_indices_buffer = given["topk_indices_buffer"]
        self.skip_k_cache_insert = given.get("skip_k_cache_insert", False)

    def forward_cuda(
        self,
        hidden_states: Tensor,
        q_quant: Any,
        k: Tensor,
        weights: Tensor,
        *,
        gate_score: Any = None,
        compress_ape: Any = None,
        index_kpool: int = 1,
        positions: Any = None,
    ) -> Tensor:
        return choose_tokens(self, q_quant, k, weights, gate_score, compress_ape, positions)
