"""The pooled indexer in Triton: rotate and round, finish pools, keep the ring, score, expand.

What: the kernels behind `indexer_op`. Why this shape: vLLM's path needs DeepGEMM and casts to e4m3.
Here e4m3 bytes are made and read by integer operations and multiplied as bf16, which holds them
exactly: the pool cache has the same bytes and the scores the same products on every GPU. Prefill,
decode and verify are one path. A pool takes each of its 16 tokens from the step or, before the
step, from the ring, so chunks need not begin at pools.

What must stay true: the ring is read by one launch before the next one writes it; strides come
from the tensors, whose blocks lie among other layers' blocks; a page beyond the block table is
neither read nor written; -1 marks an absent slot, pool or token.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, PLR0914, PLR0917 - Triton code is untyped
import triton
import triton.language as tl

from glm_exl3.attention.numbers import dot, e4m3_to_float, float_to_e4m3, to_bf16

ROWS = 16
SCORED_POOLS = 64
ABSENT = 1 << 30


@triton.jit
def _butterfly(x, N: tl.constexpr, STRIDE: tl.constexpr):
    pairs = tl.trans(tl.reshape(x, (N // (2 * STRIDE), 2, STRIDE)), 0, 2, 1)
    a, b = tl.split(pairs)
    return tl.reshape(tl.trans(tl.join(a + b, a - b), 0, 2, 1), (N,))


@triton.jit
def _rotate(x, N: tl.constexpr):
    """Hadamard-128 of every 128 numbers of the flat fp32 `x`."""
    x = _butterfly(x, N, 1)
    x = _butterfly(x, N, 2)
    x = _butterfly(x, N, 4)
    x = _butterfly(x, N, 8)
    x = _butterfly(x, N, 16)
    x = _butterfly(x, N, 32)
    x = _butterfly(x, N, 64)
    return x * 0.08838834764831845


@triton.jit
def _power_of_two_scale(absmax):
    """The least power of two s with `absmax / s <= 448`; absmax is at least 1e-4."""
    bits = (tl.maximum(absmax, 1e-4) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _rotated_e4m3(x, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """fp32 `[ROWS, 128]` -> e4m3 bytes and one scale per row, rounded to bf16 on the way."""
    flat = _rotate(tl.reshape(x, (ROWS * 128,)), ROWS * 128)
    y = tl.reshape(to_bf16(flat, WIDE).to(tl.float32), (ROWS, 128))
    scale = _power_of_two_scale(tl.max(tl.abs(y), axis=1))
    scaled = y / tl.broadcast_to(scale[:, None], (ROWS, 128))
    return float_to_e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0)), scale


@triton.jit
def rotate_kernel(x, values, scales, count, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Rotate and round `ROWS` vectors."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < count
    place = rows[:, None] * 128 + tl.arange(0, 128)[None, :]
    wide = tl.load(x + place, mask=there[:, None], other=0.0).to(tl.float32)
    numbers, scale = _rotated_e4m3(wide, ROWS, WIDE)
    tl.store(values + place, numbers, mask=there[:, None])
    tl.store(scales + rows, scale, mask=there)


@triton.jit
def complete_kernel(
    keys,
    gates,
    ape,
    positions,
    request,
    query_start,
    ring_slots,
    ring,
    cache,
    table,
    key_stride,
    gate_stride,
    ring_block_stride,
    ring_half_stride,
    ring_row_stride,
    cache_block_stride,
    table_stride,
    table_width,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the pool that one token completes; other tokens do nothing."""
    token = tl.program_id(0)
    position = tl.load(positions + token).to(tl.int32)
    slot = tl.load(ring_slots + token).to(tl.int64)
    owner = tl.load(request + token)
    pool = position // 16
    page_index = pool // PAGE
    if ((position + 1) % 16 == 0) & (slot >= 0) & (page_index < table_width):
        first = position - (token - tl.load(query_start + owner))
        o = tl.arange(0, 16)
        d = tl.arange(0, 128)
        where = position - 15 + o
        fresh = (where >= first)[:, None]
        batch = (token - 15 + o).to(tl.int64)
        block = ring + (slot // RING) * ring_block_stride
        old = block + (where % RING)[:, None] * ring_row_stride + d[None, :]
        aged = (where < first)[:, None]
        key = tl.load(keys + batch[:, None] * key_stride + d[None, :], mask=fresh, other=0.0)
        key = tl.where(fresh, key.to(tl.float32), tl.load(old, mask=aged, other=0).to(tl.float32))
        gate = tl.load(gates + batch[:, None] * gate_stride + d[None, :], mask=fresh, other=0.0)
        kept = tl.load(old + ring_half_stride, mask=aged, other=0).to(tl.float32)
        score = tl.where(fresh, to_bf16(gate.to(tl.float32), WIDE).to(tl.float32), kept)
        score += tl.load(ape + o[:, None] * 128 + d[None, :])
        weights = tl.exp(score - tl.max(score, axis=0)[None, :])
        pooled = tl.sum(weights * key, axis=0) / tl.sum(weights, axis=0)
        rounded = to_bf16(pooled, WIDE).to(tl.float32)
        numbers, scale = _rotated_e4m3(tl.reshape(rounded, (1, 128)), 1, WIDE)
        page = tl.load(table + owner.to(tl.int64) * table_stride + page_index).to(tl.int64)
        base = page * cache_block_stride
        lane = tl.arange(0, 1)[:, None] * 128 + d[None, :]
        tl.store(cache + base + (pool % PAGE) * 128 + lane, numbers)
        words = cache.to(tl.pointer_type(tl.float32)) + ((base + PAGE * 128) >> 2)
        tl.store(words + pool % PAGE + tl.arange(0, 1), scale)


@triton.jit
def keep_kernel(
    keys,
    gates,
    positions,
    request,
    lengths,
    ring_slots,
    ring,
    key_stride,
    gate_stride,
    ring_block_stride,
    ring_half_stride,
    ring_row_stride,
    RING: tl.constexpr,
):
    """Put one token's raw key and gate score into its ring, if no later one takes its slot."""
    token = tl.program_id(0)
    slot = tl.load(ring_slots + token).to(tl.int64)
    newest = tl.load(lengths + tl.load(request + token)) - RING
    if (slot >= 0) & (tl.load(positions + token).to(tl.int32) >= newest):
        d = tl.arange(0, 128)
        place = ring + (slot // RING) * ring_block_stride + (slot % RING) * ring_row_stride + d
        row = token.to(tl.int64)
        tl.store(place, tl.load(keys + row * key_stride + d).to(ring.dtype.element_ty))
        gate = tl.load(gates + row * gate_stride + d)
        tl.store(place + ring_half_stride, gate.to(ring.dtype.element_ty))


@triton.jit
def score_kernel(
    queries,
    weights,
    positions,
    request,
    cache,
    table,
    scores,
    tokens,
    heads,
    query_stride,
    weight_stride,
    cache_block_stride,
    table_stride,
    table_width,
    score_stride,
    PAGE: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Scores of BT neighbouring tokens over BP pools; -inf where a pool is not complete."""
    m = tl.arange(0, BT * BH)
    h = m % BH
    first = tl.program_id(0) * BT
    rows = (first + m // BH).to(tl.int64)
    d = tl.arange(0, 128)
    real = (rows < tokens) & (h < heads)
    place = rows[:, None] * query_stride + h[:, None] * 128 + d[None, :]
    q = e4m3_to_float(tl.load(queries + place, mask=real[:, None], other=0)).to(tl.bfloat16)
    weight = tl.load(weights + rows * weight_stride + h, mask=real, other=0.0)
    t = first + tl.arange(0, BT)
    there = t < tokens
    owner = tl.load(request + t, mask=there, other=-1)
    seen = (tl.load(positions + t, mask=there, other=-1).to(tl.int32) + 1) // 16
    pool = tl.program_id(1) * BP + tl.arange(0, BP)
    result = tl.full((BT, BP), -float("inf"), tl.float32)
    lowest = tl.load(request + first)
    highest = tl.max(owner, axis=0)
    for one in range(lowest, highest + 1):
        mine = tl.where(owner == one, seen, 0)
        page_index = pool // PAGE
        valid = (pool < tl.max(mine, axis=0)) & (page_index < table_width)
        page = tl.load(table + one * table_stride + page_index, mask=valid, other=0)
        base = page.to(tl.int64) * cache_block_stride
        inside = base + (pool % PAGE) * 128
        raw = tl.load(cache + inside[:, None] + d[None, :], mask=valid[:, None], other=0)
        words = cache.to(tl.pointer_type(tl.float32)) + ((base + PAGE * 128) >> 2)
        scale = tl.load(words + pool % PAGE, mask=valid, other=0.0)
        k = tl.trans(e4m3_to_float(raw).to(tl.bfloat16))
        products = dot(q, k, tl.zeros((BT * BH, BP), tl.float32), WIDE)
        weighed = tl.maximum(products, 0.0) * weight[:, None]
        summed = tl.sum(tl.reshape(weighed, (BT, BH, BP)), axis=1) * scale[None, :]
        result = tl.where((pool[None, :] < mine[:, None]) & valid[None, :], summed, result)
    target = scores + t.to(tl.int64)[:, None] * score_stride + pool[None, :]
    tl.store(target, result, mask=there[:, None] & (pool < score_stride)[None, :])


@triton.jit
def expand_kernel(
    pools,
    positions,
    out,
    out_stride,
    width,
    POOLS: tl.constexpr,
    SCORED: tl.constexpr,
):
    """Token ids of one row: chosen pools in ascending order, then the incomplete pool.

    A row that sees no more than the budget lists all its tokens; with SCORED off every row does.
    """
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(positions + token).to(tl.int32) + 1
    target = out + token * out_stride
    if SCORED & (length > POOLS * 16):
        ids = tl.load(pools + token * POOLS + tl.arange(0, POOLS))
        ids = tl.sort(tl.where(ids < 0, 1 << 30, ids))
        o = tl.arange(0, 16)
        listed = tl.where(ids[:, None] == 1 << 30, -1, ids[:, None] * 16 + o[None, :])
        place = tl.arange(0, POOLS)[:, None] * 16 + o[None, :]
        tl.store(target + place, listed)
        tail = length // 16 * 16 + o
        tl.store(target + POOLS * 16 + o, tl.where(tail < length, tail, -1), mask=o < 15)
        for start in range(POOLS * 16 + 15, width, 128):
            rest = start + tl.arange(0, 128)
            tl.store(target + rest, tl.full((128,), -1, tl.int32), mask=rest < width)
    else:
        for start in range(0, width, 256):
            every = start + tl.arange(0, 256)
            tl.store(target + every, tl.where(every < length, every, -1), mask=every < width)
