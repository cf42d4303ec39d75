"""The sparse attention of `sparse_mla` for up to 64 heads on SM90, in Gluon.

What: the arguments, splits and results of `sparse_mla.attend_kernel`. Why this shape: there both
warp groups compute the same scores, and copies of the next rows begin only behind the products
(docs/kv-cache.md, "Back end"). Here a warp group has half of a block's keys in the scores and half
of the columns in the values, and the next block's rows arrive meanwhile. Quantised rows become
bf16 in shared memory, scales applied.

What must stay true: see `sparse_mla`; and a buffer is overwritten only behind a barrier that
follows the wait for the products reading it. Triton sets those barriers where shared memory is
used, behind `wait_group` too.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, PLR0914, PLR0915, PLR0917 - Triton code is untyped
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

WARPS = 8
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
ROWS16 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
ROWS8 = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""The name in Triton 3.9, else that in 3.6."""
NEEDED = (hopper.warpgroup_mma, hopper.warpgroup_mma_wait, hopper.fence_async_shared)
"""Named here so that a Triton without them fails at import, where `sparse_mla` falls back."""


@gluon.jit
def _token(own, columns, stop):
    """Indices of these columns; -1 behind the end."""
    return gl.load(own + columns, mask=columns < stop, other=-1)


@gluon.jit
def _page(table, token, block_tokens, limit):
    """Block numbers of the tokens; a token that does not exist reads nothing."""
    valid = (token >= 0) & (token < limit)
    return gl.load(table + gl.maximum(token, 0) // block_tokens, mask=valid, other=0)


@gluon.jit
def _copy(target, cache, token, page, places, limit, LAYOUT: gl.constexpr, FORM: gl.constexpr):
    """Begin to copy a block of rows, zeros for tokens that do not exist; load their scales."""
    block_tokens, block_stride, row_stride = places
    rows = page.to(gl.int64) * block_stride + gl.maximum(token, 0) % block_tokens * row_stride
    valid = (token >= 0) & (token < limit)
    columns = gl.arange(0, 512, layout=gl.SliceLayout(0, FORM))
    _begin_copy(target, cache + rows[:, None] + columns[None, :], mask=valid[:, None])
    async_copy.commit_group()
    if LAYOUT == "bf16":
        return valid, valid, valid, valid
    else:  # noqa: RET505 - the compiler takes one branch
        words = cache.to(gl.pointer_type(gl.float32)) + (rows >> 2) + 128
        return (
            gl.load(words, mask=valid, other=0.0),
            gl.load(words + 1, mask=valid, other=0.0),
            gl.load(words + 2, mask=valid, other=0.0),
            gl.load(words + 3, mask=valid, other=0.0),
        )


@gluon.jit
def _decode(copied, target, scales, LAYOUT: gl.constexpr):
    """A block of quantised rows as bf16."""
    for piece in gl.static_range(4):
        codes = copied.slice(piece * 128, 128, 1).load(ROWS16)
        if LAYOUT == "fp8":
            values = codes.to(gl.float8e4nv, bitcast=True).to(gl.float32)
        else:
            bits = (codes.to(gl.int32) ^ 0x80) | 0x4B000000
            values = bits.to(gl.float32, bitcast=True) - 8388736.0
        scale = gl.convert_layout(scales[piece], gl.SliceLayout(1, ROWS16))
        target.slice(piece * 128, 128, 1).store((values * scale[:, None]).to(gl.bfloat16))


@gluon.jit
def _softmax(scores, valid, best, sums, scale_log2):
    """New maximum, factor for what was summed before, weights and their unreduced sums."""
    scores = gl.where(valid[None, :], scores * scale_log2, -float("inf"))
    higher = gl.maximum(best, gl.max(scores, axis=1))
    anchor = gl.where(higher == -float("inf"), 0.0, higher)
    alpha = gl.exp2(best - anchor)
    weights = gl.exp2(scores - anchor[:, None])
    return higher, alpha, weights, sums * alpha[:, None] + weights


@gluon.jit
def _weigh(acc, alpha, weights, shared, block):
    """Add a block's values; complete on return."""
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, VALUES))[:, None]
    shared.store(weights.to(gl.bfloat16))
    hopper.fence_async_shared()
    acc = hopper.warpgroup_mma(shared, block, acc, is_async=True)
    return hopper.warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit
def _buffers(LAYOUT: gl.constexpr):
    """Two for arriving rows and what the products read, the same for bf16; queries; weights."""
    if LAYOUT == "bf16":
        copied = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], SWIZZLED)
        keys = copied
    else:
        copied = gl.allocate_shared_memory(gl.uint8, [2, 64, 512], PLAIN)
        keys = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 512], SWIZZLED)
    queries = gl.allocate_shared_memory(gl.bfloat16, [64, 512], SWIZZLED)
    return copied, keys, queries, gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLED)


@gluon.jit
def _end(own, first, stop, SCAN: gl.constexpr):
    """Behind the last column that names a token."""
    every = first + gl.arange(0, SCAN, layout=LINE)
    listed = _token(own, every, stop)
    return gl.max(gl.where(listed >= 0, every + 1, first), axis=0)


@gluon.jit
def _divided(acc, sums):
    """The weighted means, zeros where nothing was summed, and the sums of the weights."""
    total = gl.sum(sums, axis=1)
    inverse = gl.where(total > 0.0, 1.0 / total, 0.0)
    return acc * gl.convert_layout(inverse, gl.SliceLayout(1, VALUES))[:, None], total


@gluon.jit
def _store_whole(out, heads, acc, sums, staged):
    """Round and store a token's result, through shared memory so that rows leave whole."""
    means, _ = _divided(acc, sums)
    staged.store(means.to(gl.bfloat16))
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS16))
    column = gl.arange(0, 512, layout=gl.SliceLayout(0, ROWS16))
    place = out + head[:, None] * 512 + column[None, :]
    gl.store(place, staged.load(ROWS16), mask=(head < heads)[:, None])


@gluon.jit
def _store_split(partial, lse, heads, acc, best, sums):
    """Store what a range of columns gives, for the merging kernel."""
    means, total = _divided(acc, sums)
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, VALUES))
    column = gl.arange(0, 512, layout=gl.SliceLayout(0, VALUES))
    place = partial + head[:, None] * 512 + column[None, :]
    gl.store(place, means, mask=(head < heads)[:, None])
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    gl.store(lse + head, best + gl.log2(total), mask=head < heads)


@gluon.jit
def attend_kernel(
    q, cache, table, request, indices, out, partial, lse, heads, columns, table_width, block_tokens,
    q_stride, block_stride, row_stride, table_stride, index_stride, scale_log2, splits, width,
    SCAN: gl.constexpr, LAYOUT: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """One token, up to 64 heads, one range of `width` index columns; eight warps."""
    FORM: gl.constexpr = ROWS16 if LAYOUT == "bf16" else ROWS8
    split = gl.program_id(0) % splits
    token = (gl.program_id(0) // splits).to(gl.int64)
    own = indices + token * index_stride
    table += gl.load(request + token).to(gl.int64) * table_stride
    first = split * width
    stop = gl.minimum(first + width, columns)
    limit = table_width * block_tokens
    places = (block_tokens, block_stride, row_stride)
    copied, keys, queries, shared = _buffers(LAYOUT)
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS16))
    column = gl.arange(0, 512, layout=gl.SliceLayout(0, ROWS16))
    own_q = q + token * q_stride + head[:, None] * 512 + column[None, :]
    _begin_copy(queries, own_q, mask=(head < heads)[:, None])
    lane = first + gl.arange(0, 64, layout=gl.SliceLayout(1, FORM))
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
    here = _token(own, lane, stop)
    after = _token(own, lane + 64, stop)
    page = _page(table, here, block_tokens, limit)
    scales = _copy(copied.index(0), cache, here, page, places, limit, LAYOUT, FORM)
    page = _page(table, after, block_tokens, limit)
    here, after = after, _token(own, lane + 128, stop)
    end = _end(own, first, stop, SCAN)

    best = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    sums = gl.zeros([64, 64], gl.float32, SCORES)
    acc = gl.zeros([64, 512], gl.float32, VALUES)
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    turn = 0
    for start in range(first, end, 64):
        async_copy.wait_group(0)
        block = keys.index(turn if LAYOUT == "bf16" else 0)
        if LAYOUT != "bf16":
            _decode(copied.index(turn), block, scales, LAYOUT)
        hopper.fence_async_shared()
        turned = block.permute((1, 0))
        scores = hopper.warpgroup_mma(queries, turned, zero, use_acc=False, is_async=True)
        turn = 1 - turn
        scales = _copy(copied.index(turn), cache, here, page, places, limit, LAYOUT, FORM)
        page = _page(table, after, block_tokens, limit)
        here, after = after, _token(own, start - first + lane + 192, stop)
        named = _token(own, start + key, stop)
        scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
        valid = (named >= 0) & (named < limit)
        best, alpha, weights, sums = _softmax(scores, valid, best, sums, scale_log2)
        acc = _weigh(acc, alpha, weights, shared, block)

    async_copy.wait_group(0)
    if WHOLE:
        _store_whole(out + token * heads * 512, heads, acc, sums, keys.index(0))
    else:
        row = (token * splits + split) * heads
        _store_split(partial + row * 512, lse + row, heads, acc, best, sums)
