"""Write latents into the cache, one program per token; the bytes of `ref.kv_rows.write_rows`."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, PLR0917 - Triton code is untyped
import triton
import triton.language as tl
from torch import Tensor

from glm_exl3.attention.numbers import float_to_e4m3, float_to_int8
from glm_exl3.format.kv import BF16, FP8, RowLayout


@triton.jit
def write_kernel(
    latents,
    cache,
    slots,
    block_tokens,
    latent_stride,
    block_stride,
    row_stride,
    LAYOUT: tl.constexpr,
):
    """Round one latent to its layout and store it at its slot; a negative slot stores nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        row = (slot // block_tokens) * block_stride + (slot % block_tokens) * row_stride
        group, column = tl.arange(0, 4), tl.arange(0, 128)
        place = group[:, None] * 128 + column[None, :]
        values = tl.load(latents + token * latent_stride + place).to(tl.bfloat16)
        if LAYOUT == "bf16":
            tl.store(cache + row + place, values)
        else:
            wide = values.to(tl.float32)
            absmax = tl.max(tl.abs(wide), axis=1)
            limit: tl.constexpr = 448.0 if LAYOUT == "fp8" else 127.0
            scale = tl.maximum(absmax * (1.0 / limit), 9.094947017729282e-13)
            scaled = tl.div_rn(wide, tl.broadcast_to(scale[:, None], (4, 128)))
            scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
            if LAYOUT == "fp8":
                tl.store(cache + row + place, float_to_e4m3(scaled))
            else:
                tl.store(cache + row + place, float_to_int8(scaled))
            words = cache.to(tl.pointer_type(tl.float32))
            tl.store(words + (row >> 2) + 128 + group, scale)


def write(latents: Tensor, cache: Tensor, slots: Tensor, layout: RowLayout) -> None:
    """Store latents `[n, 512]` at flat slots `[n]` (block * tokens per block + row; < 0: none).

    `cache` bf16 `[blocks, tokens, 512]` or uint8 `[blocks, tokens, row_bytes]`.
    """
    if not slots.numel():
        return
    name = "bf16" if layout is BF16 else "fp8" if layout is FP8 else "int8"
    write_kernel[(slots.numel(),)](
        latents,
        cache,
        slots,
        cache.shape[1],
        latents.stride(0),
        cache.stride(0),
        cache.stride(1),
        LAYOUT=name,
        num_warps=4,
    )
