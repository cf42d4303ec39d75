"""The EXL3 matrix layout as arithmetic.

A matrix `W[k, n]` is stored as `trellis` int16 `[k/16, n/16, 16*K]` (one ring of 256*K bits per
16x16 tile), `suh` fp16 `[k]`, `svh` fp16 `[n]` (or legacy sign words `su` int16 `[k/16]`, `sv`
int16 `[n/16]`) and at most one scalar marker tensor that names the codebook. K is never stored: it
is the last dimension of `trellis` divided by 16.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from glm_exl3.format.errors import FormatError

TILE = 16
TILE_ELEMENTS = TILE * TILE
HADAMARD = 128
STATE_BITS = 16
MCG_MARKER = 0xCBAC1FED
MUL1_MARKER = 0x83DCD12D
INTEGER_LAST_DIMS = tuple(TILE * bits for bits in range(1, 9))
HALF_LAST_DIMS = (24, 40, 56)
CONVERT = "convert the checkpoint again"


class Codebook(enum.Enum):
    """How a 16-bit state becomes a weight."""

    INST3 = "3inst"
    MCG = "mcg"
    MUL1 = "mul1"


@dataclass(frozen=True)
class MatrixLayout:
    """Shape of one packed matrix; `last_dim` is 16*K, K in {1, 1.5, 2, 2.5, 3, 3.5, 4, ..., 8}."""

    in_features: int
    out_features: int
    last_dim: int
    codebook: Codebook

    @property
    def bits(self) -> float:
        return self.last_dim / TILE

    @property
    def k_tiles(self) -> int:
        return self.in_features // TILE

    @property
    def n_tiles(self) -> int:
        return self.out_features // TILE

    @property
    def trellis_shape(self) -> tuple[int, int, int]:
        return (self.k_tiles, self.n_tiles, self.last_dim)

    @property
    def packed_bytes(self) -> int:
        """Bytes of trellis and fp16 scales."""
        trellis = self.k_tiles * self.n_tiles * self.last_dim * 2
        return trellis + 2 * (self.in_features + self.out_features)


def step_ends(last_dim: int) -> tuple[int, ...]:
    """Ring position behind each of the 256 elements of a tile: floor((i + 1) * K)."""
    return tuple((index + 1) * last_dim // TILE for index in range(TILE_ELEMENTS))


def codebook_of(
    name: str, mcg: int | None, mul1: int | None, *, file: str | None = None
) -> Codebook:
    """Codebook named by the marker values (signed or unsigned int32, None where absent).

    Raises FormatError when both are present or a value is not its constant.
    """
    if mcg is not None and mul1 is not None:
        raise FormatError(
            code="markers",
            seen="both codebook markers mcg and mul1 are present",
            why="a matrix has one codebook",
            fix=CONVERT,
            file=file,
            tensor=f"{name}.mcg",
        )
    for kind, value, constant in (("mcg", mcg, MCG_MARKER), ("mul1", mul1, MUL1_MARKER)):
        if value is not None and value & 0xFFFFFFFF != constant:
            raise FormatError(
                code="marker",
                seen=f"the marker is {value & 0xFFFFFFFF:#010x}, not {constant:#010x}",
                why="the matrix would be decoded with the wrong multiplier",
                fix="download the file again, or convert with ExLlamaV3's default multiplier",
                file=file,
                tensor=f"{name}.{kind}",
            )
    if mcg is not None:
        return Codebook.MCG
    return Codebook.INST3 if mul1 is None else Codebook.MUL1


def layout_of(
    name: str,
    trellis_shape: Sequence[int],
    codebook: Codebook,
    suh_len: int,
    svh_len: int,
    *,
    file: str | None = None,
) -> MatrixLayout:
    """Layout of matrix `name`; `suh_len` and `svh_len` are counted in channels.

    Raises FormatError for a trellis that is not `[k/16, n/16, 16K]`, K out of range, k or n that is
    no multiple of 128, and scales of another length than the trellis says.
    """

    def refuse(code: str, tensor: str, seen: str, why: str) -> FormatError:
        fix = f"download the file again; if it persists, {CONVERT}"
        return FormatError(
            code=code, seen=seen, why=why, fix=fix, file=file, tensor=f"{name}.{tensor}"
        )

    shape = tuple(trellis_shape)
    if len(shape) != 3 or min(shape) <= 0:
        raise refuse(
            "trellis-shape",
            "trellis",
            f"the shape is {list(shape)}, not [k/16, n/16, 16K]",
            "the packed bits cannot be mapped to a matrix",
        )
    legal = INTEGER_LAST_DIMS + (HALF_LAST_DIMS if codebook is Codebook.MUL1 else ())
    if shape[2] not in legal:
        raise refuse(
            "bits",
            "trellis",
            f"the last dimension {shape[2]} means K = {shape[2] / TILE:g} with {codebook.value}",
            "K is 1..8, or 1.5, 2.5, 3.5 with mul1",
        )
    k, n = shape[0] * TILE, shape[1] * TILE
    for label, value in (("k", k), ("n", n)):
        if value % HADAMARD:
            raise refuse(
                "dims",
                "trellis",
                f"{label} = {value} is not a multiple of {HADAMARD}",
                "the Hadamard rotation works on blocks of 128 channels",
            )
    for tensor, expected, got in (("suh", k, suh_len), ("svh", n, svh_len)):
        if expected != got:
            raise refuse(
                "scales",
                tensor,
                f"it scales {got} channels, the trellis has {expected}",
                "scales and trellis belong to different matrices",
            )
    return MatrixLayout(k, n, shape[2], codebook)
