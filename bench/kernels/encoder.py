"""How many tiles a second the encoder does, on random tiles, checks and all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from glm_exl3.ops.cuda_encode import encode_tiles
from kernels.cases import MCG

TILES = 30_000
BITS = (4, 5, 6)
TARGET = 50_000.0


@dataclass(frozen=True)
class Rate:
    """Tiles of 256 values per second at one rate."""

    k_bits: int
    codebook: str
    tiles_per_s: float

    def __str__(self) -> str:
        verdict = "met" if self.tiles_per_s >= TARGET else "missed"
        speed = f"{self.tiles_per_s:,.0f} tiles/s"
        return f"encode K{self.k_bits} {self.codebook}: {speed}, target {TARGET:,.0f}: {verdict}"


def rates() -> Iterator[Rate]:
    generator = torch.Generator("cuda").manual_seed(9)
    tiles = torch.randn(TILES, 256, device="cuda", generator=generator)
    for bits in BITS:
        encode_tiles(tiles[:1000], bits, MCG)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        encode_tiles(tiles, bits, MCG)
        torch.cuda.synchronize()
        yield Rate(bits, MCG.value, round(TILES / (time.perf_counter() - begin), 0))
