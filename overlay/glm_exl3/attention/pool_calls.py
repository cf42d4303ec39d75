"""Calls of the indexer's kernels: one step's tokens in, the top-k buffer's rows out.

The functions take plain tensors. `choose` selects pools with the function it is given: vLLM's
per-row top-k on a GPU, `torch.topk` in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from glm_exl3.attention import pools
from glm_exl3.attention.numbers import INTERPRETED
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.kv import INDEX_DIM, POOL_ROW_BYTES, POOL_TOKENS

Select = Callable[[Tensor, Tensor, Tensor], None]
"""`select(scores, counts, out)`: ids of the best pools per row into out int32 `[T, G]`."""


@dataclass(frozen=True)
class Step:
    """One step's tokens, in request order.

    keys, gates `[T, 128]`; positions int `[T]`; request int32 `[T]` (row of the tables);
    query_start int32 `[R + 1]`; lengths int32 `[R]` (tokens of the request after the step);
    ring_slots int `[T]` (block * ring + position % ring, -1 for none).
    """

    keys: Tensor
    gates: Tensor
    ape: Tensor
    positions: Tensor
    request: Tensor
    query_start: Tensor
    lengths: Tensor
    ring_slots: Tensor


@dataclass(frozen=True)
class Asked:
    """The step's queries: e4m3 bytes `[T, H, 128]` and fp32 weights `[T, H]` with their scales."""

    queries: Tensor
    weights: Tensor


@dataclass(frozen=True)
class PoolCache:
    """pages uint8 `[blocks, P, 132]` (128 e4m3 bytes of each pool, then all scales), any block
    stride; table int32 `[R, blocks]`; ring bf16 `[blocks, 2, ring, 128]`, keys then gates.
    """

    pages: Tensor
    table: Tensor
    ring: Tensor

    def check(self) -> None:
        """Raises GlmExl3Error for a cache of another form."""
        ring = self.ring.shape[2]
        fits = (
            self.pages.shape[2] == POOL_ROW_BYTES
            and self.pages.stride(2) == 1
            and self.pages.stride(0) % 4 == 0
            and self.ring.stride(3) == 1
            and ring >= POOL_TOKENS
            and ring & (ring - 1) == 0
        )
        if not fits:
            raise GlmExl3Error(
                code="indexer-cache",
                seen=f"pages {tuple(self.pages.shape)} strides {self.pages.stride()}, ring "
                f"{tuple(self.ring.shape)} strides {self.ring.stride()}",
                why="the indexer's kernels address both as format.kv describes them",
                fix="report it with the vLLM version",
            )


def rotate(x: Tensor) -> tuple[Tensor, Tensor]:
    """Hadamard-128 and e4m3 of `[n, 128]`: bytes `[n, 128]` as float8_e4m3fn, scales `[n, 1]`."""
    count = x.shape[0]
    values = torch.empty(count, INDEX_DIM, dtype=torch.uint8, device=x.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    if count:
        grid = (triton.cdiv(count, pools.ROWS),)
        pools.rotate_kernel[grid](
            x, values, scales, count, ROWS=pools.ROWS, WIDE=INTERPRETED, num_warps=4
        )
    return values.view(torch.float8_e4m3fn), scales


def keep_heads(x: Tensor, pad: int) -> Tensor:
    """The padding of heads that DeepGEMM needs, left out."""
    return x


def insert(step: Step, cache: PoolCache) -> None:
    """Write the pools that the step completes, then its newest raw keys into the rings."""
    tokens = step.positions.shape[0]
    if not tokens:
        return
    pages, ring = cache.pages, cache.ring
    pools.complete_kernel[(tokens,)](
        step.keys,
        step.gates,
        step.ape,
        step.positions,
        step.request,
        step.query_start,
        step.ring_slots,
        ring,
        pages,
        cache.table,
        step.keys.stride(0),
        step.gates.stride(0),
        ring.stride(0),
        ring.stride(1),
        ring.stride(2),
        pages.stride(0),
        cache.table.stride(0),
        cache.table.shape[1],
        RING=ring.shape[2],
        PAGE=pages.shape[1],
        WIDE=INTERPRETED,
        num_warps=4,
    )
    pools.keep_kernel[(tokens,)](
        step.keys,
        step.gates,
        step.positions,
        step.request,
        step.lengths,
        step.ring_slots,
        ring,
        step.keys.stride(0),
        step.gates.stride(0),
        ring.stride(0),
        ring.stride(1),
        ring.stride(2),
        RING=ring.shape[2],
        num_warps=1,
    )


def score(
    queries: Tensor,
    weights: Tensor,
    positions: Tensor,
    request: Tensor,
    cache: PoolCache,
    out: Tensor,
) -> None:
    """Scores of T tokens into out fp32 `[T, pools]`; -inf at pools a token does not see.

    queries: e4m3 bytes `[T, H, 128]`; weights fp32 `[T, H]`, the queries' scales in them.
    """
    tokens, heads, _ = queries.shape
    together = 1 if tokens <= 16 else 4
    padded = max(16, triton.next_power_of_2(heads))
    grid = (triton.cdiv(tokens, together), triton.cdiv(out.shape[1], pools.SCORED_POOLS))
    pools.score_kernel[grid](
        queries.view(torch.uint8),
        weights,
        positions,
        request,
        cache.pages,
        cache.table,
        out,
        tokens,
        heads,
        queries.stride(0),
        weights.stride(0),
        cache.pages.stride(0),
        cache.table.stride(0),
        cache.table.shape[1],
        out.stride(0),
        PAGE=cache.pages.shape[1],
        BT=together,
        BH=padded,
        BP=pools.SCORED_POOLS,
        WIDE=INTERPRETED,
        num_warps=4,
    )


def expand(chosen: Tensor | None, positions: Tensor, budget: int, out: Tensor) -> None:
    """Fill out int32 `[T, W]` from chosen pools int32 `[T, budget / 16]`; None: list everything."""
    tokens = positions.shape[0]
    if tokens:
        pools.expand_kernel[(tokens,)](
            out if chosen is None else chosen,
            positions,
            out,
            out.stride(0),
            out.shape[1],
            POOLS=budget // POOL_TOKENS,
            SCORED=chosen is not None,
            num_warps=4,
        )


def choose(
    asked: Asked,
    step: Step,
    cache: PoolCache,
    longest: int,
    budget: int,
    scratch_bytes: int,
    select: Select,
    out: Tensor,
) -> None:
    """Fill out int32 `[T, W]` with each token's chosen token ids, -1 behind them.

    `longest` bounds every request's length; scores take at most `scratch_bytes` at a time.
    """
    if longest <= budget:
        expand(None, step.positions, budget, out)
        return
    tokens, width = step.positions.shape[0], triton.cdiv(longest // POOL_TOKENS, 4) * 4
    rows = max(1, min(tokens, scratch_bytes // (4 * width)))
    scores = torch.empty(rows, width, dtype=torch.float32, device=out.device)
    chosen = torch.empty(rows, budget // POOL_TOKENS, dtype=torch.int32, device=out.device)
    for start in range(0, tokens, rows):
        part = slice(start, min(tokens, start + rows))
        count = part.stop - start
        positions = step.positions[part]
        score(
            asked.queries[part],
            asked.weights[part],
            positions,
            step.request[part],
            cache,
            scores[:count],
        )
        seen = ((positions + 1) // POOL_TOKENS).to(torch.int32)
        select(scores[:count], seen, chosen[:count])
        expand(chosen[:count], positions, budget, out[part])


def select_with_torch(scores: Tensor, counts: Tensor, out: Tensor) -> None:
    """`Select` by `torch.topk`, for any device."""
    width = min(out.shape[1], scores.shape[1])
    best = scores.topk(width, dim=1).indices
    out.fill_(-1)
    out[:, :width] = torch.where(best < counts[:, None], best, -1).to(torch.int32)
