"""Packed bits -> states -> weights, and back to bits.

One tile is a ring of 256*K bits in 8K little-endian 32-bit words, most significant bit first inside
a word. Element i ends at ring position floor((i+1)*K); its state is the 16 bits before that
position, so a state is the previous one shifted by the bits of its step, and the ring closes on
itself. Elements are stored in tensor-core fragment order, see `tile_positions`.
"""

from __future__ import annotations

from functools import cache

import torch

from glm_exl3.format.layout import HADAMARD, STATE_BITS, TILE, TILE_ELEMENTS, Codebook, step_ends
from glm_exl3.ref.codebook import codebook_table
from glm_exl3.ref.hadamard import had128


@cache
def tile_positions() -> torch.Tensor:
    """int64 [256]: row * 16 + column of element i, lane t = i // 8, j = i % 8."""
    i = torch.arange(TILE_ELEMENTS)
    lane, j = i >> 3, i & 7
    row = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1)
    column = (lane >> 2) + 8 * (j >> 2)
    return row * TILE + column


def _ring_words(trellis: torch.Tensor) -> torch.Tensor:
    """int16 [..., 16K] -> int64 [..., 8K], the 32-bit words of each tile."""
    halves = trellis.to(torch.int64) & 0xFFFF
    pairs = halves.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 16)


def unpack_states(trellis: torch.Tensor) -> torch.Tensor:
    """trellis int16 [..., 16K] -> states int32 [..., 256] in element order."""
    last_dim = trellis.shape[-1]
    words = _ring_words(trellis)
    starts = (torch.tensor(step_ends(last_dim)) - STATE_BITS) % (TILE * last_dim)
    starts = starts.to(trellis.device)
    first = words[..., starts >> 5]
    second = words[..., ((starts >> 5) + 1) % words.shape[-1]]
    offset = starts & 31
    # 48 bits are enough for any 16-bit window and keep int64 free of its sign bit.
    window = (first << STATE_BITS) | (second >> STATE_BITS)
    return ((window >> (32 - offset)) & 0xFFFF).to(torch.int32)


def pack_states(states: torch.Tensor, last_dim: int) -> torch.Tensor:
    """states [..., 256] -> trellis int16 [..., 16K]; the inverse of `unpack_states`.

    Only the newest bits of each state are stored. Raises ValueError when the states do not form a
    closed ring, that is when unpacking would return other states.
    """
    ends = torch.tensor(step_ends(last_dim))
    positions = torch.arange(TILE * last_dim)
    owner = torch.searchsorted(ends, positions, right=True)
    shift = (ends[owner] - 1 - positions).to(states.device)
    bits = (states.to(torch.int64)[..., owner.to(states.device)] >> shift) & 1
    weights = 1 << torch.arange(31, -1, -1, device=states.device)
    words = (bits.unflatten(-1, (-1, 32)) * weights).sum(-1)
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten(-2)
    trellis = torch.where(halves >= 1 << 15, halves - (1 << 16), halves).to(torch.int16)
    if not torch.equal(unpack_states(trellis), states.to(torch.int32)):
        raise ValueError("the states do not form a closed ring of the trellis")
    return trellis


def codebook_values(states: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """states int [...] -> fp16 weights [...]."""
    return codebook_table(codebook).to(states.device)[states.to(torch.int64)]


def decode_rotated(trellis: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """The inner matrix between the rotations: trellis [k/16, n/16, 16K] -> fp16 [k, n]."""
    values = codebook_values(unpack_states(trellis), codebook)
    tiles = torch.empty_like(values)
    tiles[..., tile_positions().to(trellis.device)] = values
    k_tiles, n_tiles = trellis.shape[:2]
    grid = tiles.reshape(k_tiles, n_tiles, TILE, TILE).transpose(1, 2)
    return grid.reshape(k_tiles * TILE, n_tiles * TILE)


def channel_scales(scales: torch.Tensor) -> torch.Tensor:
    """fp16 `suh`/`svh` [c] as they are; legacy int16 `su`/`sv` sign words [c/16] as +-1 fp16 [c].

    Bit i of word j belongs to channel 16j + i; a set bit means -1.
    """
    if scales.is_floating_point():
        return scales
    bits = (scales.to(torch.int32)[:, None] >> torch.arange(TILE, device=scales.device)) & 1
    return (1 - 2 * bits).flatten().to(torch.float16)


def dequantize(
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: Codebook,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """W [k, n] = diag(suh) H What H diag(svh), computed in fp32 (fp64 when asked for).

    `suh`, `svh` are fp16 scales or legacy int16 sign words.
    """
    work = torch.float64 if dtype is torch.float64 else torch.float32
    inner = decode_rotated(trellis, codebook).to(work)
    rotated = had128(had128(inner, dim=0), dim=1)
    left, right = channel_scales(suh).to(work), channel_scales(svh).to(work)
    assert inner.shape[0] % HADAMARD == 0
    return (left[:, None] * rotated * right[None, :]).to(dtype)
