"""The sparse indexer of a step: pool keys, keep the tail ring, choose tokens.

What: the metadata builder and the operator behind `SparseAttnIndexerKpool`. Why this shape: on the
GPU, decode and prefill are different kernels with different metadata; here both are one path, so
chunk starts need not be aligned to pools and a verify step equals single steps.

What must stay true: the ring is read before it is written; only the last ring-length tokens of a
request are written, so no slot is written twice; requests that fit the budget select everything in
order, without scoring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import _resolve_layer_name
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from glm_exl3.cpu.backends.requests import Requests, requests_of
from glm_exl3.ref import indexer

SCORE_TOKENS = 128


@dataclass
class IndexerMetadata:
    """One step of an indexer cache: block_table `[R, blocks]` in cache pages."""

    block_table: Tensor
    requests: Requests
    first: Tensor
    lengths: Tensor
    num_prefills: int
    num_decodes: int
    num_decode_tokens: int


class IndexerBuilder(AttentionMetadataBuilder):
    """Keeps the request boundaries of a step on the host."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: ClassVar[int | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> IndexerMetadata:
        requests = requests_of(common_attn_metadata)
        lengths = torch.tensor(requests.lengths)
        starts = torch.tensor(requests.starts)
        return IndexerMetadata(
            block_table=common_attn_metadata.block_table_tensor,
            requests=requests,
            first=lengths - starts.diff(),
            lengths=lengths,
            num_prefills=0,
            num_decodes=requests.count,
            num_decode_tokens=requests.tokens,
        )


def builder_class() -> type[AttentionMetadataBuilder]:
    """What `Glm5NextIndexerBackend.get_builder_cls` returns here."""
    return IndexerBuilder


@dataclass(frozen=True)
class Step:
    """Inputs of one layer's indexer, cut to the step's tokens."""

    queries: Tensor
    weights: Tensor
    keys: Tensor
    scores: Tensor
    ape: Tensor
    positions: Tensor
    pool_size: int


def sparse_attn_indexer_kpool(  # noqa: PLR0913, PLR0917 - vLLM's signature
    hidden_states: Tensor,
    k_cache_prefix: Any,
    kv_cache: Tensor,
    q_quant: Tensor,
    q_scale: Tensor | None,
    k: Tensor,
    weights: Tensor,
    quant_block_size: int,
    scale_fmt: str | None,
    topk_tokens: int,
    head_dim: int,
    max_pool_len: int,
    total_seq_lens: int,
    topk_indices_buffer: Tensor,
    skip_k_cache_insert: bool,
    use_fp4_cache: bool,
    gate_score: Tensor,
    compress_ape: Tensor,
    index_kpool: int,
    positions: Tensor,
    tail_kv_cache: Tensor,
    tail_prefix: Any,
    *_: Any,
) -> Tensor:
    """Choose the tokens of every query; returns the buffer with ids per row, -1 as padding."""
    every = get_forward_context().attn_metadata
    if not isinstance(every, dict):
        return topk_indices_buffer
    metadata: IndexerMetadata = every[_resolve_layer_name(k_cache_prefix)]
    tail_slots = every[_resolve_layer_name(tail_prefix)].slot_mapping
    tokens = metadata.requests.tokens
    step = Step(
        q_quant[:tokens],
        weights[:tokens],
        k[:tokens],
        gate_score[:tokens],
        compress_ape,
        positions[:tokens].long(),
        index_kpool,
    )
    if not skip_k_cache_insert:
        insert(step, metadata, kv_cache, tail_kv_cache, tail_slots[:tokens])
    topk_indices_buffer[: hidden_states.shape[0]] = -1
    choose(step, metadata, kv_cache, topk_tokens, topk_indices_buffer[:tokens])
    return topk_indices_buffer


def insert(
    step: Step, metadata: IndexerMetadata, cache: Tensor, tail: Tensor, tail_slots: Tensor
) -> None:
    """Write the pools that this step completes, then keep the newest raw keys in the ring."""
    ring = tail.shape[2]
    positions, size = step.positions, step.pool_size
    owner = metadata.requests.of_token
    complete = ((positions + 1) % size == 0).nonzero()[:, 0]
    if complete.numel():
        requests = owner[complete]
        blocks = tail_slots[complete].clamp_min(0) // ring
        starts = positions[complete] - (size - 1)
        first = metadata.first[requests]
        keys, scores = (
            indexer.gather_pool(batch, tail[blocks, half], complete, starts, first, size)
            for half, batch in ((0, step.keys), (1, step.scores.to(tail.dtype)))
        )
        pooled = indexer.rotate(indexer.pool_keys(keys, scores, step.ape))
        pools = positions[complete] // size
        page = cache.shape[1]
        pages = metadata.block_table[requests, pools // page].long()
        indexer.write_pools(cache, pages * page + pools % page, *indexer.quantise(pooled))
    newest = (positions >= metadata.lengths[owner] - ring) & (tail_slots >= 0)
    slots = tail_slots[newest]
    tail[slots // ring, 0, slots % ring] = step.keys[newest].to(tail.dtype)
    tail[slots // ring, 1, slots % ring] = step.scores[newest].to(tail.dtype)


def choose(step: Step, metadata: IndexerMetadata, cache: Tensor, budget: int, out: Tensor) -> None:
    """Fill `out` `[T, W]` with the chosen token ids of every query."""
    requests = metadata.requests
    for row in range(requests.count):
        part = slice(requests.starts[row], requests.starts[row + 1])
        length = requests.lengths[row]
        if part.start == part.stop:
            continue
        visible = step.positions[part] + 1
        if length <= budget:
            ids = torch.arange(length, dtype=out.dtype)
            out[part, :length] = torch.where(ids < visible[:, None], ids, -1)
            continue
        keys = indexer.read_pools(cache, metadata.block_table[row], length // step.pool_size)
        for start in range(part.start, part.stop, SCORE_TOKENS):
            rows = slice(start, min(part.stop, start + SCORE_TOKENS))
            lengths = step.positions[rows] + 1
            scores = indexer.score_pools(step.queries[rows], step.weights[rows], keys)
            pools = indexer.select_pools(
                scores, lengths // step.pool_size, budget // step.pool_size
            )
            chosen = indexer.expand_pools(pools, lengths, step.pool_size)
            out[rows, : chosen.shape[1]] = chosen


def fwht128_quant_fp8(q: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate and quantise queries `[n, 128]`: fp8 `[n, 128]` and fp32 scales `[n, 1]`."""
    values, scales = indexer.quantise(indexer.rotate(q))
    return values, scales[:, None]


def k_norm(x: Tensor, weight: Tensor, bias: Tensor, dim: int, eps: float) -> Tensor:
    """LayerNorm of the index keys in fp32."""
    return torch.nn.functional.layer_norm(x.float(), (dim,), weight, bias, eps).type_as(x)


def weight_scale(weights: Tensor, q_scale: Tensor, scale: float) -> Tensor:
    """Head weights `[n, H]` times the queries' fp8 scales `[n, H, 1]` and the constant."""
    return weights * q_scale.squeeze(-1) * scale


def keep_heads(x: Tensor, pad: int) -> Tensor:
    """The padding of heads that GPU kernels need, left out."""
    return x
