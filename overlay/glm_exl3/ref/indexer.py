"""The sparse indexer: pooled keys in an fp8 cache, scores, pool selection, tail ring.

What: every 16 tokens become one pool, whose key is a learned softmax average of the tokens' index
keys, rotated by Hadamard-128 and stored as fp8 with a power-of-two scale. A query scores the pools
of its past, keeps the best `index_topk / 16` and always attends to its own incomplete pool. The
raw keys and gate scores of the incomplete pool live in a ring per request, so that decode can
finish it.

Why this shape: the byte layout, the roundings (bf16 after pooling and after the rotation, fp8) and
the ring follow the GPU kernels, so that a cache means the same on every back end; the functions
take plain tensors and know nothing of an engine.

What must stay true: cache page = all keys of the page, then all its fp32 scales; `-1` marks an
absent pool or token; selected pools are in ascending order, so that equal sets give equal sums.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

HEAD_DIM = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_ABSMAX = 1e-4


@cache
def _hadamard(device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < HEAD_DIM:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rotate(x: Tensor) -> Tensor:
    """fp32 Hadamard rotation of `[..., 128]`, orthonormal."""
    return (x.float() @ _hadamard(x.device)) * (1.0 / math.sqrt(HEAD_DIM))


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `[..., 128]` to bf16, then to fp8 with one power-of-two scale `[...]` per vector."""
    wide = x.to(torch.bfloat16).float()
    absmax = wide.abs().amax(-1).clamp_min(MIN_ABSMAX)
    scale = torch.exp2(torch.ceil(torch.log2(absmax * (1.0 / FP8_MAX))))
    return (wide / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def pool_keys(keys: Tensor, scores: Tensor, ape: Tensor) -> Tensor:
    """Softmax average per channel: keys, scores `[n, P, 128]`, ape `[P, 128]` -> `[n, 128]`."""
    weights = torch.softmax(scores.float() + ape.float(), dim=1)
    return (weights * keys.float()).sum(1).to(torch.bfloat16).float()


def cache_views(cache_pages: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a uint8 cache `[B, P, 132]`: key bytes `[B, P, 128]` and fp32 scales `[B, P]`."""
    blocks, page, width = cache_pages.shape
    flat = cache_pages.as_strided((blocks, page * width), (cache_pages.stride(0), 1))
    keys = flat[:, : page * HEAD_DIM].unflatten(1, (page, HEAD_DIM))
    return keys, flat[:, page * HEAD_DIM :].view(torch.float32)


def write_pools(cache_pages: Tensor, slots: Tensor, keys: Tensor, scales: Tensor) -> None:
    """Store fp8 keys `[n, 128]` and scales `[n]` at flat slots `[n]` (page * P + row)."""
    page = cache_pages.shape[1]
    key_view, scale_view = cache_views(cache_pages)
    rows = slots % page
    blocks = slots // page
    key_view[blocks, rows] = keys.view(torch.uint8)
    scale_view[blocks, rows] = scales


def read_pools(cache_pages: Tensor, block_row: Tensor, count: int) -> Tensor:
    """The first `count` pool keys of one request, fp32 `[count, 128]`, scales applied."""
    page = cache_pages.shape[1]
    key_view, scale_view = cache_views(cache_pages)
    pools = torch.arange(count, device=block_row.device)
    blocks, rows = block_row[pools // page].long(), pools % page
    keys = key_view[blocks, rows].view(FP8).float()
    return keys * scale_view[blocks, rows][:, None]


def score_pools(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """`sum_h weights[t, h] relu(q[t, h] . key)`: q `[T, H, 128]`, weights `[T, H]` -> `[T, P]`."""
    heads = torch.matmul(queries.float(), keys.t()).relu_()
    return torch.matmul(weights.float()[:, None, :], heads)[:, 0]


def select_pools(scores: Tensor, pool_counts: Tensor, budget: int) -> Tensor:
    """Ids of the `budget` best visible pools per row, ascending, -1 behind: int64 `[T, budget]`."""
    available = scores.shape[1]
    ids = torch.arange(available, device=scores.device)
    visible = ids[None, :] < pool_counts[:, None]
    if available <= budget:
        chosen = torch.where(visible, ids, available)
    else:
        best = scores.masked_fill(~visible, float("-inf")).topk(budget, dim=1).indices
        chosen = torch.where(best < pool_counts[:, None], best, available).sort(dim=1).values
    chosen = torch.where(chosen == available, -1, chosen)
    return torch.nn.functional.pad(chosen, (0, budget - chosen.shape[1]), value=-1)


def expand_pools(pool_ids: Tensor, lengths: Tensor, pool_size: int) -> Tensor:
    """Token ids of the selected pools and of the incomplete last pool.

    pool_ids `[T, G]`, lengths `[T]` (tokens visible to the row, itself included).
    Returns int32 `[T, G * P + P - 1]`.
    """
    offsets = torch.arange(pool_size, device=pool_ids.device)
    tokens = pool_ids[:, :, None] * pool_size + offsets
    tokens = torch.where(pool_ids[:, :, None] >= 0, tokens, -1).flatten(1)
    start = lengths // pool_size * pool_size
    tail = start[:, None] + offsets[: pool_size - 1]
    tail = torch.where(tail < lengths[:, None], tail, -1)
    return torch.cat([tokens, tail], dim=1).int()


def gather_pool(
    batch: Tensor, ring: Tensor, rows: Tensor, starts: Tensor, first: Tensor, pool_size: int
) -> Tensor:
    """Values of the pool that each of n tokens completes, from the batch or, before it, the ring.

    batch `[T, D]`; ring `[n, R, D]`: the ring of each token's request; rows `[n]`: index of the
    completing token in the batch; starts `[n]`: position of the pool's first token; first `[n]`:
    position of the request's first token in the batch. Returns `[n, P, D]`.
    """
    offsets = torch.arange(pool_size, device=batch.device)
    positions = starts[:, None] + offsets
    batch_rows = (rows[:, None] - (pool_size - 1) + offsets).clamp_min(0)
    ring_rows = positions % ring.shape[1]
    old = ring.gather(1, ring_rows[:, :, None].expand(-1, -1, ring.shape[2]))
    return torch.where((positions >= first[:, None])[:, :, None], batch[batch_rows], old)
