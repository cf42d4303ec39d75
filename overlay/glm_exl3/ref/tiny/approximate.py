"""A fast approximate encoder for the few matrices of a tiny checkpoint that have structure.

What: `beam_encode` finds a good closed ring of states per tile by beam search; `approximate` packs
a given matrix with it. Why not the exact encoder of `glm_exl3.ref.encode`: that searches
65,536 states per value, minutes for a tiny drafter on one core; a beam of a few paths takes seconds
and its noise, 4 % at 6 bits and 10 % at 4, is small beside the structure it has to keep.

What must stay true: the states form a closed ring. Every path starts behind state 0, so the newest
`16 - K` bits of the last state must be 0; the last steps, where that leaves no choice, get a wide
beam so that a path that fits is among those kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm_exl3.format.layout import STATE_BITS, TILE, TILE_ELEMENTS, Codebook
from glm_exl3.ref.codebook import codebook_table
from glm_exl3.ref.decode import pack_states, tile_positions
from glm_exl3.ref.hadamard import had128
from glm_exl3.ref.tiny.matrices import CODEBOOK_STD, Packed
from glm_exl3.ref.tiny.recipe import RandomStreams

BEAM = 16
CLOSING_BEAM = 128
_CLOSING_STEPS = 3
_TILES_AT_ONCE = 512


def beam_encode(tiles: Tensor, bits: int, codebook: Codebook) -> Tensor:
    """tiles fp32 `[T, 256]` in element order -> states int32 `[T, 256]`, a closed ring each."""
    table = codebook_table(codebook).to(torch.float32)
    return torch.cat([_encode(part, bits, table) for part in tiles.split(_TILES_AT_ONCE)])


def _forced_bits(step: int, bits: int) -> int:
    """How many of the newest bits of a step are zero because the ring has to close."""
    behind = (TILE_ELEMENTS - 1 - step) * bits
    return max(0, min(bits, STATE_BITS - bits - behind))


def _encode(tiles: Tensor, bits: int, table: Tensor) -> Tensor:
    count = tiles.shape[0]
    state = torch.zeros((count, 1), dtype=torch.int64)
    cost = torch.zeros((count, 1))
    origins: list[Tensor] = []
    chosen: list[Tensor] = []
    first_forced = next(s for s in range(TILE_ELEMENTS) if _forced_bits(s, bits))
    for step in range(TILE_ELEMENTS):
        forced = _forced_bits(step, bits)
        newest = torch.arange(1 << (bits - forced)) << forced
        reached = ((state << bits) & 0xFFFF)[:, :, None] | newest
        error = (table[reached] - tiles[:, step, None, None]).square_()
        total = (cost[:, :, None] + error).flatten(1)
        width = BEAM if step < first_forced - _CLOSING_STEPS else CLOSING_BEAM
        cost, index = total.topk(min(width, total.shape[1]), largest=False)
        state = reached.flatten(1).gather(1, index)
        origins.append(index // len(newest))
        chosen.append(state)
    path = cost.argmin(dim=1, keepdim=True)
    states = torch.empty((count, TILE_ELEMENTS), dtype=torch.int32)
    for step in range(TILE_ELEMENTS - 1, -1, -1):
        states[:, step] = chosen[step].gather(1, path)[:, 0].to(torch.int32)
        path = origins[step].gather(1, path)
    return states


def _scales(rms: Tensor) -> Tensor:
    """fp16-exact scales; a channel without values gets scale 0, which decodes to exact zeros."""
    return rms.to(torch.float16).to(torch.float64)


def _divided(values: Tensor, scales: Tensor) -> Tensor:
    return torch.where(scales == 0, torch.zeros((), dtype=values.dtype), values / scales)


def approximate(
    weight: Tensor, bits: int, codebook: Codebook, streams: RandomStreams, name: str
) -> Packed:
    """A packed matrix near `weight` `[k, n]`, with the signs of stream `name`."""
    rows, columns = weight.shape
    weight = weight.double()
    signs = streams.signs(f"{name}.sv", columns)
    svh = _scales(weight.square().mean(0).sqrt() * signs)
    half = had128(_divided(weight, svh), dim=1)
    rms = half.square().mean(1).sqrt() / CODEBOOK_STD[codebook]
    suh = _scales(rms * streams.signs(f"{name}.su", rows))
    inner = had128(_divided(half, suh[:, None]), dim=0).float()
    grid = inner.view(rows // TILE, TILE, columns // TILE, TILE).transpose(1, 2)
    tiles = grid.reshape(-1, TILE_ELEMENTS)[:, tile_positions()]
    states = beam_encode(tiles.contiguous(), bits, codebook)
    trellis = pack_states(states, TILE * bits).view(rows // TILE, columns // TILE, TILE * bits)
    return Packed(trellis, suh.to(torch.float16), svh.to(torch.float16), codebook)
