"""Triton kernel: few tokens against 8-bit rows, y = (x @ codes^T) * scale.

One program owns some output channels and all of k, so nothing is added between programs and a
token's bits depend neither on its neighbours nor on their number within a tile. Codes become bf16
in registers, which is exact for both kinds. e4m3 is decoded either by the hardware's
conversion (`native`, from compute capability 8.9) or with integers: its exponent and mantissa laid
into fp32 give the value times 2^-120, subnormals included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917 - Triton code is untyped

INT8, FP8_BITS, FP8_NATIVE = 0, 1, 2


class Tile(NamedTuple):
    """Tokens, output channels and inputs of one step of a program, and how many are in flight."""

    tokens: int
    columns: int
    depth: int
    stages: int


FEW, MANY = Tile(16, 16, 256, 4), Tile(64, 64, 128, 3)
"""At most 80 KiB of shared memory: every architecture from 8.0 on has that."""


@triton.jit
def _decode(codes, KIND: tl.constexpr, WORK: tl.constexpr):
    if KIND == 1:
        wide = codes.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(WORK)
    if KIND == 2:
        return codes.to(tl.float8e4nv, bitcast=True).to(WORK)
    return codes.to(WORK)


@triton.jit
def _rows_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    y_ptr,
    tokens,
    n,
    k,
    KIND: tl.constexpr,
    WORK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    offset = tl.arange(0, DEPTH)
    total = tl.zeros((BLOCK_M, COLUMNS), dtype=tl.float32)
    for start in range(0, k, DEPTH):
        column = start + offset
        inside = column < k
        x = tl.load(
            x_ptr + token[:, None] * k + column[None, :],
            mask=(token[:, None] < tokens) & inside[None, :],
            other=0.0,
        )
        codes = tl.load(
            codes_ptr + row[None, :].to(tl.int64) * k + column[:, None],
            mask=(row[None, :] < n) & inside[:, None],
            other=0,
        )
        total = tl.dot(x.to(WORK), _decode(codes, KIND, WORK), total)
    scale = tl.load(scale_ptr + row, mask=row < n, other=0.0)
    y = (total * scale[None, :]).to(y_ptr.dtype.element_ty)
    where = (token[:, None] < tokens) & (row[None, :] < n)
    tl.store(y_ptr + token[:, None].to(tl.int64) * n + row[None, :], y, mask=where)


def rows(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    kind: int | None = None,
    *,
    precise: bool = False,
) -> torch.Tensor:
    """x bf16 [t, k], codes e4m3 or int8 [n, k], scale fp32 [n] -> [t, n] in x.dtype.

    `kind` overrules how e4m3 is decoded; by itself the hardware does it where it can.
    `precise` multiplies in fp32, for Triton's interpreter, which has no bf16 product.
    """
    tokens, k = x.shape
    n = codes.shape[0]
    if kind is None:
        kind = INT8 if codes.dtype == torch.int8 else _fp8_kind(codes.device)
    read = codes if kind == INT8 else codes.view(torch.uint8)
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    tile = FEW if tokens <= FEW.tokens else MANY
    grid = (triton.cdiv(tokens, tile.tokens), triton.cdiv(n, tile.columns))
    _rows_kernel[grid](
        x.contiguous(), read, scale, y, tokens, n, k,
        KIND=kind, WORK=tl.float32 if precise else tl.bfloat16,
        BLOCK_M=tile.tokens, COLUMNS=tile.columns, DEPTH=tile.depth,
        num_warps=4, num_stages=tile.stages,
    )  # fmt: skip
    return y


def _fp8_kind(device: torch.device) -> int:
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return FP8_NATIVE if native else FP8_BITS
