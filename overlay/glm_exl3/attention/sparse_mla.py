"""Sparse multi-query attention over latent rows, for decode, verify and prefill alike.

What: every query token attends to the cache rows that its index row names; one row is key and
value of all heads. Why this shape: heads are the rows of a matrix product, so a gathered row is
read once for all of them. The 512 columns are four pieces of 128 with accumulators of their own:
quantised rows have one scale per piece, applied to the scores and to the weights, so their numbers
enter the products exactly. Few tokens are split over keys until the GPU is full; a second kernel
merges the pieces by their log-sum-exp. Bounds and tile choices: docs/kv-cache.md, "Back end".

What must stay true: an index of -1 or beyond the block table adds nothing and reads nothing; a
token without any valid index gives zeros; no shape depends on data, so launches can be captured.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, PLR0917 - Triton code is untyped
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm_exl3.attention.numbers import INTERPRETED, dot, e4m3_to_float, int8_to_float, to_bf16
from glm_exl3.attention.tiles import Tile, split_columns, tile_for
from glm_exl3.format.kv import BF16, FP8, LATENT, RowLayout
from glm_exl3.log import logger

_log = logger(__name__)

PIECE = 128
LOG2_E = 1.4426950408889634
Allocate = Callable[..., Sequence[Tensor]]
"""`allocate((shape, dtype), ...)` gives one workspace for each pair, all valid at once."""


@triton.jit
def _piece(cache, rows, valid, INDEX: tl.constexpr, LAYOUT: tl.constexpr):
    """One piece of the rows as bf16 `[BK, 128]`, without its scale."""
    columns = INDEX * 128 + tl.arange(0, 128)
    raw = tl.load(cache + rows[:, None] + columns[None, :], mask=valid[:, None], other=0)
    if LAYOUT == "bf16":
        return raw
    if LAYOUT == "fp8":
        return raw.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    if LAYOUT == "fp8_bits":
        return e4m3_to_float(raw).to(tl.bfloat16)
    return int8_to_float(raw).to(tl.bfloat16)


@triton.jit
def _scale(cache, rows, valid, INDEX: tl.constexpr, LAYOUT: tl.constexpr):
    """The scale of one piece, fp32 `[BK]`; ones where rows have none."""
    if LAYOUT == "bf16":
        return tl.full((rows.shape[0],), 1.0, tl.float32)
    words = cache.to(tl.pointer_type(tl.float32))
    return tl.load(words + (rows >> 2) + (128 + INDEX), mask=valid, other=0.0)


@triton.jit
def _score(scores, q, k, scale, LAYOUT: tl.constexpr, WIDE: tl.constexpr):
    if LAYOUT == "bf16":
        return dot(q, tl.trans(k), scores, WIDE)
    return scores + dot(q, tl.trans(k), tl.zeros_like(scores), WIDE) * scale[None, :]


@triton.jit
def _weigh(acc, alpha, weights, v, scale, LAYOUT: tl.constexpr, WIDE: tl.constexpr):
    scaled = weights
    if LAYOUT != "bf16":
        scaled = weights * scale[None, :]
    return dot(to_bf16(scaled, WIDE), v, acc * alpha[:, None], WIDE)


@triton.jit
def _locate(indices, table, columns, stop, places):
    """Offsets of the rows in the cache and which of them exist."""
    block_tokens, table_width, block_stride, row_stride = places
    token = tl.load(indices + columns, mask=columns < stop, other=-1)
    valid = (token >= 0) & (token < table_width * block_tokens)
    page_index = tl.maximum(token, 0) // block_tokens
    page = tl.load(table + page_index, mask=valid, other=0).to(tl.int64)
    within = tl.maximum(token, 0) - page_index * block_tokens
    return page * block_stride + within * row_stride, valid


@triton.jit
def _four(pointer, mask):
    """The four pieces of rows of 512."""
    return (
        tl.load(pointer, mask=mask, other=0.0),
        tl.load(pointer + 128, mask=mask, other=0.0),
        tl.load(pointer + 256, mask=mask, other=0.0),
        tl.load(pointer + 384, mask=mask, other=0.0),
    )


@triton.jit
def _step(
    q, acc, best, total, cache, located, scale_log2, LAYOUT: tl.constexpr, WIDE: tl.constexpr
):
    """One block of keys: the four accumulators, the running maximum and the running sum."""
    rows, valid = located
    k0 = _piece(cache, rows, valid, 0, LAYOUT)
    k1 = _piece(cache, rows, valid, 1, LAYOUT)
    k2 = _piece(cache, rows, valid, 2, LAYOUT)
    k3 = _piece(cache, rows, valid, 3, LAYOUT)
    s0 = _scale(cache, rows, valid, 0, LAYOUT)
    s1 = _scale(cache, rows, valid, 1, LAYOUT)
    s2 = _scale(cache, rows, valid, 2, LAYOUT)
    s3 = _scale(cache, rows, valid, 3, LAYOUT)
    scores = tl.zeros((q[0].shape[0], rows.shape[0]), tl.float32)
    scores = _score(scores, q[0], k0, s0, LAYOUT, WIDE)
    scores = _score(scores, q[1], k1, s1, LAYOUT, WIDE)
    scores = _score(scores, q[2], k2, s2, LAYOUT, WIDE)
    scores = _score(scores, q[3], k3, s3, LAYOUT, WIDE)
    scores = tl.where(valid[None, :], scores * scale_log2, -float("inf"))
    higher = tl.maximum(best, tl.max(scores, axis=1))
    anchor = tl.where(higher == -float("inf"), 0.0, higher)
    alpha = tl.exp2(best - anchor)
    weights = tl.exp2(scores - anchor[:, None])
    acc0 = _weigh(acc[0], alpha, weights, k0, s0, LAYOUT, WIDE)
    acc1 = _weigh(acc[1], alpha, weights, k1, s1, LAYOUT, WIDE)
    acc2 = _weigh(acc[2], alpha, weights, k2, s2, LAYOUT, WIDE)
    acc3 = _weigh(acc[3], alpha, weights, k3, s3, LAYOUT, WIDE)
    return acc0, acc1, acc2, acc3, higher, total * alpha + tl.sum(weights, axis=1)


@triton.jit
def _finish(target, acc, total, mask, WIDE: tl.constexpr):
    """Store four pieces divided by their sum, zeros where nothing was summed."""
    inverse = tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    for place in tl.static_range(4):
        value = acc[place] * inverse
        if target.dtype.element_ty == tl.bfloat16:
            tl.store(target + place * 128, to_bf16(value, WIDE), mask=mask)
        else:
            tl.store(target + place * 128, value, mask=mask)


@triton.jit
def attend_kernel(
    q, cache, table, request, indices, out, partial, lse, heads, columns, table_width, block_tokens,
    q_stride, block_stride, row_stride, table_stride, index_stride, scale_log2, splits,
    SPLIT: tl.constexpr, SCAN: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    LAYOUT: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One token, one block of heads, one range of index columns."""
    head_blocks = tl.cdiv(heads, BH)
    pid = tl.program_id(0)
    split = (pid // head_blocks) % splits
    token = (pid // (head_blocks * splits)).to(tl.int64)
    h = (pid % head_blocks) * BH + tl.arange(0, BH)
    d = tl.arange(0, 128)
    mask_h = h < heads
    pieces = _four(q + token * q_stride + h[:, None] * 512 + d[None, :], mask_h[:, None])
    own = indices + token * index_stride
    own_table = table + tl.load(request + token).to(tl.int64) * table_stride
    first = split * SPLIT
    stop = tl.minimum(first + SPLIT, columns)
    every = first + tl.arange(0, SCAN)
    listed = tl.load(own + every, mask=every < stop, other=-1)
    end = tl.max(tl.where(listed >= 0, every + 1, first), axis=0)

    best = tl.full((BH,), -float("inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc0 = tl.zeros((BH, 128), tl.float32)
    acc1 = tl.zeros((BH, 128), tl.float32)
    acc2 = tl.zeros((BH, 128), tl.float32)
    acc3 = tl.zeros((BH, 128), tl.float32)
    lane = tl.arange(0, BK)
    places = (block_tokens, table_width, block_stride, row_stride)
    rows, valid = _locate(own, own_table, first + lane, stop, places)
    for start in tl.range(first, end, BK, num_stages=STAGES):
        acc = (acc0, acc1, acc2, acc3)
        acc0, acc1, acc2, acc3, best, total = _step(
            pieces, acc, best, total, cache, (rows, valid), scale_log2, LAYOUT, WIDE
        )
        rows, valid = _locate(own, own_table, start + BK + lane, stop, places)

    acc = (acc0, acc1, acc2, acc3)
    if WHOLE:
        target = out + (token * heads + h[:, None]) * 512 + d[None, :]
        _finish(target, acc, total, mask_h[:, None], WIDE)
    else:
        row = (token * splits + split) * heads + h
        _finish(partial + row[:, None] * 512 + d[None, :], acc, total, mask_h[:, None], WIDE)
        tl.store(lse + row, best + tl.log2(total), mask=mask_h)


@triton.jit
def merge_kernel(partial, lse, out, heads, splits, SPLITS: tl.constexpr, WIDE: tl.constexpr):
    """Weighted sum of the splits of one token, one head and one piece."""
    pid = tl.program_id(0)
    piece = pid % 4
    head = (pid // 4) % heads
    token = (pid // (4 * heads)).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = piece * 128 + tl.arange(0, 128)
    rows = (token * splits + s) * heads + head
    sums = tl.load(lse + rows, mask=s < splits, other=-float("inf"))
    best = tl.max(sums, axis=0)
    weights = tl.exp2(sums - tl.where(best == -float("inf"), 0.0, best))
    total = tl.sum(weights, axis=0)
    parts = tl.load(partial + rows[:, None] * 512 + d[None, :], mask=s[:, None] < splits, other=0.0)
    summed = tl.sum(parts * weights[:, None], axis=0)
    result = tl.where(total > 0.0, summed / total, 0.0)
    tl.store(out + (token * heads + head) * 512 + d, to_bf16(result, WIDE))


@dataclass(frozen=True)
class Paged:
    """The cache of one layer.

    rows: bf16 `[blocks, tokens, 512]` or uint8 `[blocks, tokens, row_bytes]`, any block stride;
    table: int32 `[requests, blocks]`, its block numbers.
    """

    rows: Tensor
    table: Tensor
    layout: RowLayout


def workspace_shapes(tokens: int, heads: int, splits: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the fp32 workspaces: the split outputs and their log-sum-exp."""
    rows = tokens * splits * heads
    return (rows, LATENT), (rows,)


def attend(
    q: Tensor,
    paged: Paged,
    request: Tensor,
    indices: Tensor,
    scale: float,
    tile: Tile,
    splits: int,
    allocate: Allocate,
) -> Tensor:
    """Attention of T tokens over the rows their indices name.

    q bf16 `[T, H, 512]`, request int32 `[T]` (row of the block table), indices int32 `[T, W]`
    (positions in the request, -1 for none). `splits` is a wish. Returns bf16 `[T, H, 512]`.
    """
    tokens, heads, _ = q.shape
    columns = indices.shape[1]
    out = torch.empty_like(q)
    if not tokens:
        return out
    width = split_columns(columns, splits, tile.keys)
    splits = triton.cdiv(columns, width)
    whole = splits == 1
    partial = lse = out
    if not whole:
        shapes = workspace_shapes(tokens, heads, splits)
        partial, lse = allocate(*((shape, torch.float32) for shape in shapes))
    rows, table = paged.rows, paged.table
    strides = (q.stride(0), rows.stride(0), rows.stride(1), table.stride(0), indices.stride(0))
    arguments = (
        *(q, rows, table, request, indices, out, partial, lse),
        *(heads, columns, table.shape[1], rows.shape[1], *strides, scale * LOG2_E, splits),
    )
    if tile.kernel == "triton":
        attend_kernel[(triton.cdiv(heads, tile.heads) * splits * tokens,)](
            *arguments,
            SPLIT=width,
            SCAN=triton.next_power_of_2(width),
            WHOLE=whole,
            BH=tile.heads,
            BK=tile.keys,
            LAYOUT=kernel_layout(paged.layout, tile),
            STAGES=tile.stages,
            WIDE=INTERPRETED,
            num_warps=tile.warps,
        )
    else:
        _attend_on_hopper((*arguments, width), splits * tokens, columns, paged.layout)
    if not whole:
        size = max(2, triton.next_power_of_2(splits))
        merge_kernel[(4 * heads * tokens,)](
            partial, lse, out, heads, splits, SPLITS=size, WIDE=INTERPRETED
        )
    return out


@functools.cache
def hopper_module() -> ModuleType | None:
    """`glm_exl3.attention.hopper`, or None where this Triton lacks what it names, logged once."""
    try:
        return import_module("glm_exl3.attention.hopper")
    except (ImportError, AttributeError, TypeError) as error:
        _log.warning(
            "Triton %s lacks a part of Gluon (%s: %s), so sparse attention takes the plain kernel, "
            "up to four times as slow; Triton 3.6.0 and 3.9.0 have what it needs",
            *(triton.__version__, type(error).__name__, error),
        )
        return None


def launch_tile(architecture: int, heads: int, layout: RowLayout, tokens: int) -> Tile:
    """The tile of a launch on this machine: `tile_for`, the plain kernel's without Gluon."""
    tile = tile_for(architecture, heads, layout, tokens)
    if tile.kernel == "hopper" and hopper_module() is None:
        return tile_for(architecture, heads, layout, tokens, gluon=False)
    return tile


def _attend_on_hopper(
    arguments: tuple[Any, ...], programs: int, columns: int, layout: RowLayout
) -> None:
    """Launch the kernel of `glm_exl3.attention.hopper`, which only SM90 can compile."""
    from glm_exl3.attention import hopper

    hopper.attend_kernel[(programs,)](
        *arguments,
        SCAN=triton.next_power_of_2(columns),
        LAYOUT=layout.name,
        WHOLE=arguments[-2] == 1,
        num_warps=hopper.WARPS,
    )


def kernel_layout(layout: RowLayout, tile: Tile) -> str:
    """The kernel's name for a layout: e4m3 by instruction or by integer operations."""
    if layout is BF16:
        return "bf16"
    if layout is FP8:
        return "fp8" if tile.native_e4m3 else "fp8_bits"
    return "int8"
