"""Tail-biting Viterbi encoder: values -> trellis states.

A tile of 256 values becomes the closed ring of states whose decoded values are nearest in squared
error. A step of K bits goes from state p to s = (p << K | new) & 0xffff, so the 2^K predecessors of
s are (q << (16 - K)) | h, q = 0 .. 2^K - 1, and depend on its head h = s >> K only. The ring is
closed in two passes: pass 1 runs over the tile rotated by 128 with free ends and yields the state
of element 255; pass 2 runs over the tile with that state at both ends.

Arithmetic contract, for kernels that must return the same bits. All fp32, every operation rounded
on its own (no fused multiply-add), table[s] being the fp16 codebook value:

    best[0][h]    = 0 in pass 1; in pass 2, 0 where h = closing & (2^(16-K) - 1), else +inf
    cost[i][s]    = fl(fl(d * d) + best[i][s >> K]),  d = fl(table[s] - x[i])
    best[i+1][h]  = min over q of cost[i][(q << (16 - K)) | h]

Pass 1 ends in the lowest s of least cost[255], pass 2 in s = closing. The way back takes, before
state s, the predecessor of least cost and lowest q among equals. Only `best` is kept, the few costs
on the way back are computed again. Given `best`, no order of evaluation can change the result.

Source: trellis-coded quantisation as in QTIP (Tseng et al., 2024), with the bit layout of
`glm_exl3.format.layout`.
"""

from __future__ import annotations

import torch

from glm_exl3.format.layout import STATE_BITS, TILE_ELEMENTS, Codebook
from glm_exl3.ref.codebook import STATES, codebook_table

ROTATION = TILE_ELEMENTS // 2
CPU_BATCH, GPU_BATCH = 4, 256
"""Tiles at once: 256 KiB of work space each, plus 64 MiB / 2^K of history."""


def encode_tiles(
    tiles: torch.Tensor, bits: int, codebook: Codebook, batch: int | None = None
) -> torch.Tensor:
    """tiles [..., 256] in element order -> states int32 [..., 256], a closed ring per tile.

    `bits` is 1..8. The result does not depend on `batch`, the tiles encoded at once. Raises
    ValueError for other rates or values that are not finite.
    """
    check_encodable(tiles, bits)
    flat = tiles.reshape(-1, TILE_ELEMENTS).to(torch.float32)
    table = codebook_table(codebook).to(torch.float32).to(tiles.device)
    size = batch or (GPU_BATCH if flat.is_cuda else CPU_BATCH)
    states = torch.empty(flat.shape, dtype=torch.int32, device=tiles.device)
    for start in range(0, flat.shape[0], size):
        states[start : start + size] = _encode(flat[start : start + size], bits, table)
    return states.reshape(tiles.shape)


def check_encodable(tiles: torch.Tensor, bits: int) -> None:
    """Raises ValueError unless K is 1..8 and every value is finite."""
    if bits not in range(1, 9):
        raise ValueError(f"K must be an integer from 1 to 8, got {bits}")
    if not torch.isfinite(tiles).all():
        raise ValueError("values to encode must be finite")


def _encode(tiles: torch.Tensor, bits: int, table: torch.Tensor) -> torch.Tensor:
    heads = STATES >> bits
    best = tiles.new_zeros((TILE_ELEMENTS + 1, tiles.shape[0], heads))
    rotated = tiles.roll(-ROTATION, dims=1)
    ends = _forward(rotated, bits, table, best).argmin(dim=1)
    closing = _trace(rotated, bits, table, best, ends)[:, ROTATION - 1]
    best[0].fill_(torch.inf).scatter_(1, closing[:, None] & (heads - 1), 0.0)
    _forward(tiles, bits, table, best)
    return _trace(tiles, bits, table, best, closing)


def _forward(
    tiles: torch.Tensor, bits: int, table: torch.Tensor, best: torch.Tensor
) -> torch.Tensor:
    """Fill best[1:] ([257, B, 2^(16-K)]) from best[0]; return the last cost [B, 65536]."""
    count, heads = best.shape[1:]
    cost = tiles.new_empty((count, STATES))
    by_head, by_tail = cost.view(count, heads, 1 << bits), cost.view(count, 1 << bits, heads)
    for step in range(TILE_ELEMENTS):
        torch.sub(table, tiles[:, step, None], out=cost)
        cost.mul_(cost)
        torch.add(by_head, best[step, :, :, None], out=by_head)
        torch.amin(by_tail, dim=1, out=best[step + 1])
    return cost


def _trace(
    tiles: torch.Tensor,
    bits: int,
    table: torch.Tensor,
    best: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    """States int64 [B, 256] of the cheapest path that ends in `last` [B]."""
    states = torch.empty(tiles.shape, dtype=torch.int64, device=tiles.device)
    branches = torch.arange(1 << bits, device=tiles.device) << (STATE_BITS - bits)
    states[:, -1] = last
    for step in range(TILE_ELEMENTS - 1, 0, -1):
        predecessors = (states[:, step, None] >> bits) | branches
        error = table[predecessors] - tiles[:, step - 1, None]
        cost = error * error + best[step - 1].gather(1, predecessors >> bits)
        chosen = cost.argmin(dim=1, keepdim=True)
        states[:, step - 1] = predecessors.gather(1, chosen)[:, 0]
    return states
