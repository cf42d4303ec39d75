"""Tile sizes of the sparse attention kernel per architecture, and how many splits fill a GPU.

Those of 64 heads on SM90 are measured (bench/kv/results/variants-h200.json and tiles-h200.json;
docs/kv-cache.md, "Back end"), those of 32 and 16 follow from times of other tiles; all others are
chosen without a GPU, from shared memory, registers and spills of the compiled kernels
(bench/kv/results/compiled.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from glm_exl3.format.kv import BF16, RowLayout

MAX_SPLITS = 64
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Shared memory of one thread block by architecture."""
NATIVE_E4M3 = 89


@dataclass(frozen=True)
class Tile:
    """One program: `heads` x `keys`, in `warps` warps, with loads `stages` deep.

    `kernel`: the one in plain Triton, or that of `glm_exl3.attention.hopper`.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    native_e4m3: bool
    kernel: Literal["triton", "hopper"] = "triton"


Steps = tuple[tuple[int, Tile], ...]
"""Up to how many query tokens of a launch which tile; the last one serves any number."""
FEW, ANY = 8, 1 << 62
ONE = Tile(16, 32, 4, 2, native_e4m3=True)
HOPPER = Tile(64, 64, 8, 2, native_e4m3=True, kernel="hopper")
MEASURED: dict[int, dict[bool, Steps]] = {
    heads: {True: ((most, ONE), (ANY, HOPPER)), False: ((ANY, HOPPER),)}
    for heads, most in ((64, 1), (32, 1), (16, 32))
}
"""By heads of a rank and whether rows are bf16 the fastest on SM90.

64 heads: NVIDIA H200, 2026-11-30, 128k tokens of context, timed from 1 to 2,048 tokens. 32 and 16:
chosen by the times of their plain tiles and of 64 heads, which bound those of fewer in the same
tile (same machine and day, bench/kv/results/measure-h200.json); timed is only `ONE` at 16 heads.
"""
PLAIN: dict[int, dict[bool, Steps]] = {
    64: {
        True: (
            (1, ONE),
            (FEW, Tile(32, 32, 4, 2, native_e4m3=True)),
            (ANY, Tile(64, 64, 8, 2, native_e4m3=True)),
        ),
        False: (
            (1, Tile(32, 32, 8, 2, native_e4m3=True)),
            (ANY, Tile(64, 32, 8, 2, native_e4m3=True)),
        ),
    }
}
"""The same among the tiles of the plain kernel, timed at 1, 8 and 2,048 tokens."""


def shared_bytes(architecture: int) -> int:
    """Shared memory of one block on `architecture` (80, 86, ...); the next lower known one's."""
    known = [name for name in SHARED_BYTES if name <= architecture]
    return SHARED_BYTES[max(known)] if known else SHARED_BYTES[86]


def tile_for(
    architecture: int, heads: int, layout: RowLayout, tokens: int, *, gluon: bool = True
) -> Tile:
    """The tile of a launch with `tokens` query tokens and `heads` heads per rank.

    `gluon`: whether `glm_exl3.attention.hopper` can be had.
    """
    steps = _steps(architecture, heads, layout, gluon)
    return next(tile for most, tile in steps if tokens <= most)


def largest_tile(architecture: int, heads: int, layout: RowLayout) -> Tile:
    """Of all that launches may take, the one with most heads: it needs the largest workspace.

    A split launch has at most one program per multiprocessor, and a program writes as many rows as
    it has heads that exist: multiprocessors x min(heads of the tile, `heads`).
    """
    every = (_steps(architecture, heads, layout, gluon) for gluon in (True, False))
    return max((tile for steps in every for _, tile in steps), key=lambda tile: tile.heads)


def _steps(architecture: int, heads: int, layout: RowLayout, gluon: bool) -> Steps:
    """What was measured, else one tile for any number of tokens."""
    measured = MEASURED if gluon else PLAIN
    if architecture == 90 and heads in measured:
        return measured[heads][layout is BF16]
    return ((ANY, _unmeasured(architecture, heads, layout)),)


def _unmeasured(architecture: int, heads: int, layout: RowLayout) -> Tile:
    """For any number of tokens; none of these spills more than 150 bytes a thread.

    64 heads in one tile need the shared memory of SM90 and, with scales to apply, more registers
    than there are: quantised rows take 32 and gather twice, the second time from L2.
    """
    native = architecture >= NATIVE_E4M3
    if heads <= 16:
        return Tile(16, 32, 4 if layout is BF16 else 8, 2, native)
    if heads <= 32 or layout is not BF16 or shared_bytes(architecture) < SHARED_BYTES[90]:
        roomy = layout is BF16 and shared_bytes(architecture) >= SHARED_BYTES[80]
        return Tile(32, 32, 8, 3 if roomy else 2, native)
    return Tile(64, 32, 8, 2, native)


def splits_for(tokens: int, heads: int, tile: Tile, processors: int) -> int:
    """Ranges of keys, a power of two, so that the programs fill `processors` multiprocessors."""
    programs = max(1, tokens * -(-heads // tile.heads))
    splits = 1
    while splits < MAX_SPLITS and programs * splits * 2 <= processors:
        splits *= 2
    return splits


def split_columns(columns: int, splits: int, keys: int) -> int:
    """Columns of one range: a multiple of `keys` that covers `columns` in at most `splits`."""
    blocks = -(-columns // keys)
    return -(-blocks // splits) * keys
