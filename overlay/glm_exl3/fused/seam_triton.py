"""The seam of an mHC layer (`mhc_seam`) in Triton, for GPUs whose blocks form no clusters.

Every program owns a slice of the hidden dimension of one token: it makes the new streams,
multiplies them with its columns of `fn` and leaves partial sums. The program that arrives last at
the token's counter adds the partial sums up in a fixed order and does the rest, so the result does
not depend on who was last.

Measured on one H200 (2026-11-29, hidden size 4096, in a graph of 90 calls, fp32 `fn` from memory):
8.4 and 8.6 us at 1 and 2 tokens, vLLM's two launches 8.8; slower from 4 tokens on, so those calls
stay with vLLM.

What must stay true: counters are zero between launches (the last program resets its own), and one
counter buffer serves one stream at a time.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917 - Triton code is untyped
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm_exl3.ref.mhc import HyperParameters

STREAMS = 4
MIXES = STREAMS * (2 + STREAMS)
LANES = 32
SLICE = 32
MAX_TOKENS = 2
WARPS = 4


@triton.jit
def _advance(x, streams, post, comb, fn, new_streams, token, h, n, HIDDEN, MIXES):
    """New streams of one slice; its share of the 24 mixes and, behind them, of the squares."""
    old = streams + token * 4 * HIDDEN + h
    s0 = tl.load(old).to(tl.float32)
    s1 = tl.load(old + HIDDEN).to(tl.float32)
    s2 = tl.load(old + 2 * HIDDEN).to(tl.float32)
    s3 = tl.load(old + 3 * HIDDEN).to(tl.float32)
    out = tl.load(x + token * HIDDEN + h).to(tl.float32)
    sums = tl.zeros((n.shape[0], h.shape[0]), tl.float32)
    squares = tl.zeros((h.shape[0],), tl.float32)
    for stream in tl.static_range(4):
        weights = fn + n[:, None] * (4 * HIDDEN) + stream * HIDDEN + h[None, :]
        columns = tl.load(weights, mask=n[:, None] < MIXES, other=0.0)
        mixing = comb + token * 16 + stream
        value = tl.load(post + token * 4 + stream) * out
        value += tl.load(mixing) * s0 + tl.load(mixing + 4) * s1
        value += tl.load(mixing + 8) * s2 + tl.load(mixing + 12) * s3
        rounded = value.to(tl.bfloat16)
        tl.store(new_streams + token * 4 * HIDDEN + stream * HIDDEN + h, rounded)
        wide = rounded.to(tl.float32)
        sums += columns * wide[None, :]
        squares += wide * wide
    return tl.where(n == MIXES, tl.sum(squares, axis=0), tl.sum(sums, axis=1))


@triton.jit
def _collapse(new_streams, norm_weight, block_input, gates, n, token, pre_eps, norm_eps, HIDDEN):
    """The streams weighted by the first four gates, RMS-normalised."""
    columns = tl.arange(0, HIDDEN)
    mixed = tl.zeros((HIDDEN,), tl.float32)
    for stream in tl.static_range(4):
        pre = tl.sum(tl.where(n == stream, gates, 0.0), axis=0) + pre_eps
        whole = new_streams + (token * 4 + stream) * HIDDEN + columns
        mixed += pre * tl.load(whole, cache_modifier=".cg").to(tl.float32)
    mixed = mixed.to(tl.bfloat16).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(mixed * mixed, axis=0) / HIDDEN + norm_eps)
    result = mixed * inverse * tl.load(norm_weight + columns).to(tl.float32)
    tl.store(block_input + token * HIDDEN + columns, result.to(tl.bfloat16))


@triton.jit
def _softmax(row, eps):
    row = tl.exp(row - tl.max(row, axis=0))
    return row / tl.sum(row, axis=0) + eps


@triton.jit
def _balance(comb, eps, ITERATIONS: tl.constexpr):
    """`ref.mhc.sinkhorn` of the 4 x 4 logits at `comb`, in place."""
    column = tl.arange(0, 4)
    a = _softmax(tl.load(comb + column), eps)
    b = _softmax(tl.load(comb + 4 + column), eps)
    c = _softmax(tl.load(comb + 8 + column), eps)
    d = _softmax(tl.load(comb + 12 + column), eps)
    for step in range(ITERATIONS):
        if step > 0:
            a = a / (tl.sum(a, axis=0) + eps)
            b = b / (tl.sum(b, axis=0) + eps)
            c = c / (tl.sum(c, axis=0) + eps)
            d = d / (tl.sum(d, axis=0) + eps)
        inverse = 1.0 / (a + b + c + d + eps)
        a, b, c, d = a * inverse, b * inverse, c * inverse, d * inverse
    tl.debug_barrier()
    tl.store(comb + column, a)
    tl.store(comb + 4 + column, b)
    tl.store(comb + 8 + column, c)
    tl.store(comb + 12 + column, d)


@triton.jit
def _seam_kernel(
    x,
    streams,
    post,
    comb,
    fn,
    scale,
    base,
    norm_weight,
    new_streams,
    partials,
    counters,
    post_out,
    comb_out,
    block_input,
    rms_eps,
    pre_eps,
    sinkhorn_eps,
    post_multiplier,
    norm_eps,
    ITERATIONS: tl.constexpr,
    HIDDEN: tl.constexpr,
    SLICE: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    MIXES: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    split = tl.program_id(0)
    h, n = split * SLICE + tl.arange(0, SLICE), tl.arange(0, LANES)
    row = _advance(x, streams, post, comb, fn, new_streams, token, h, n, HIDDEN, MIXES)
    tl.store(partials + (token * SPLITS + split) * LANES + n, row)
    tl.debug_barrier()
    if tl.atomic_add(counters + token, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(counters + token, 0)
        rows = partials + (token * SPLITS + tl.arange(0, SPLITS)[:, None]) * LANES + n[None, :]
        mixes = tl.sum(tl.load(rows, cache_modifier=".cg"), axis=0)
        squares = tl.sum(tl.where(n == MIXES, mixes, 0.0), axis=0)
        mixes *= tl.rsqrt(squares / (4 * HIDDEN) + rms_eps)
        kind = tl.where(n < 4, 0, tl.where(n < 8, 1, 2))
        logits = mixes * tl.load(scale + kind) + tl.load(base + n, mask=n < MIXES, other=0.0)
        mixing = comb_out + token * 16
        tl.store(mixing + n - 8, logits, mask=(n >= 8) & (n < MIXES))
        gates = tl.sigmoid(logits)
        tl.store(post_out + token * 4 + n - 4, gates * post_multiplier, mask=(n >= 4) & (n < 8))
        tl.debug_barrier()
        _collapse(new_streams, norm_weight, block_input, gates, n, token, pre_eps, norm_eps, HIDDEN)
        _balance(mixing, sinkhorn_eps, ITERATIONS)


@cache
def counters(device: torch.device) -> Tensor:
    """The arrival counters of a device, zero between launches."""
    return torch.zeros(MAX_TOKENS, dtype=torch.int32, device=device)


def takes(streams: Tensor, norm_weight: Tensor) -> bool:
    """As `mhc_seam.takes`, of this kernel alone."""
    tokens, count, hidden = streams.shape
    return (
        0 < tokens <= MAX_TOKENS
        and count == STREAMS
        and streams.dtype is torch.bfloat16
        and hidden % SLICE == 0
        and hidden & (hidden - 1) == 0
        and norm_weight.dtype is torch.bfloat16
    )


def seam(  # noqa: PLR0913, PLR0917 - the tensors of one seam in their order
    x: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    parameters: HyperParameters,
    norm_weight: Tensor,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `mhc_seam.seam`."""
    tokens, _, hidden = streams.shape
    splits = hidden // SLICE
    new_streams = torch.empty_like(streams)
    partials = torch.empty(tokens, splits, LANES, dtype=torch.float32, device=x.device)
    post_out = torch.empty(tokens, STREAMS, 1, dtype=torch.float32, device=x.device)
    comb_out = torch.empty(tokens, STREAMS, STREAMS, dtype=torch.float32, device=x.device)
    block_input = torch.empty_like(x)
    _seam_kernel[splits, tokens](
        x,
        streams,
        post,
        comb,
        fn,
        scale,
        base,
        norm_weight,
        new_streams,
        partials,
        counters(x.device),
        post_out,
        comb_out,
        block_input,
        parameters.rms_eps,
        parameters.pre_eps,
        parameters.sinkhorn_eps,
        parameters.post_multiplier,
        norm_eps,
        ITERATIONS=parameters.iterations,
        HIDDEN=hidden,
        SLICE=SLICE,
        SPLITS=splits,
        LANES=LANES,
        MIXES=MIXES,
        num_warps=WARPS,
    )
    return new_streams, post_out, comb_out, block_input
