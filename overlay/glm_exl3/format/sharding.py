"""Tensor-parallel cuts of packed matrices.

Cuts lie at multiples of 128 features because both Hadamard rotations work on blocks of 128: cutting
there, column shards concatenate and row shards sum to the whole exactly. Sizes that do not divide
are cut unevenly, larger shards first; where ranks must hold equal shapes, the shorter shards are
padded with zero scales, which contribute exact zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm_exl3.format.errors import FormatError
from glm_exl3.format.layout import HADAMARD


@dataclass(frozen=True)
class Cut:
    """Features [start, stop) of one rank, held in a width of `padded` >= stop - start."""

    start: int
    stop: int
    padded: int

    @property
    def width(self) -> int:
        return self.stop - self.start

    @property
    def padding(self) -> int:
        return self.padded - self.width


def block_cuts(
    size: int, ranks: int, *, block: int = HADAMARD, equal: bool = False
) -> tuple[Cut, ...]:
    """Cut `size` features into `ranks` shards of whole blocks.

    With `equal`, every shard is padded to the largest. Raises FormatError when `size` is no
    multiple of `block` or has fewer blocks than ranks.
    """
    blocks, rest = divmod(size, block)
    if ranks < 1 or rest or blocks < ranks:
        raise FormatError(
            code="tp-cut",
            seen=f"TP cannot cut {size} features into {ranks} shards of whole {block}-blocks",
            why="a cut inside a Hadamard block changes the result",
            fix=f"use a tensor-parallel size of at most {max(blocks, 1)}",
        )
    base, larger = divmod(blocks, ranks)
    widths = [(base + (rank < larger)) * block for rank in range(ranks)]
    cuts, start = [], 0
    for width in widths:
        cuts.append(Cut(start, start + width, max(widths) if equal else width))
        start += width
    return tuple(cuts)
