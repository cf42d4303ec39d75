"""Eight-bit numbers in Triton without instructions that older GPUs lack.

What: e4m3 and int8 to and from wider types with shifts, masks and one exact float operation, so
that the same bytes are written and read from SM80 on. Why this shape: Triton casts to and from
e4m3 only on SM89 and later.

What must stay true: decoding is exact, subnormals included (e4m3 bits shifted to the exponent of
an fp32 number are that number times 2^-120); encoding rounds to nearest, ties to even, like the
cast, for |x| <= 448.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202 - Triton code is untyped
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Triton's interpreter multiplies the bits of bf16 operands and cuts numbers off to bf16: there,
`dot` widens its operands and `to_bf16` rounds by hand."""


@triton.jit
def e4m3_to_float(byte):
    """uint8 -> fp32; the two NaN patterns come out as 480."""
    wide = byte.to(tl.int32)
    magnitude = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    sign = (wide & 0x80) << 24
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def float_to_e4m3(x):
    """fp32 within +-448 -> uint8."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def int8_to_float(byte):
    """uint8 holding a two's complement int8 -> fp32."""
    wide = (byte.to(tl.int32) ^ 0x80) | 0x4B000000
    return wide.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def float_to_int8(x):
    """fp32 within +-127 -> uint8 holding the nearest int8, ties to even."""
    shifted = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return shifted.to(tl.uint8)


@triton.jit
def dot(a, b, acc, WIDE: tl.constexpr):
    """`acc + a @ b` of bf16 operands in fp32; `WIDE` widens them first, which changes nothing."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def to_bf16(x, WIDE: tl.constexpr):
    """fp32 rounded to the nearest bf16, ties to even."""
    if WIDE:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)
