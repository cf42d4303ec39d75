"""Quantise a matrix to EXL3 without calibration data, in memory that grows with the matrix only.

The arithmetic of `glm_exl3.ref.quantize` for an identity Hessian. There the metric of the rotated
inputs is block diagonal in the Hadamard blocks, so error feedback never leaves a strip of 128 rows:
strips are encoded one by one, and the factor of a strip is 128 x 128. The refit of the scales
becomes two sums. A matrix may be cut between blocks before or after: only the scales see it whole.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from glm_exl3.format.layout import HADAMARD, TILE, TILE_ELEMENTS, Codebook
from glm_exl3.ref.codebook import codebook_table
from glm_exl3.ref.decode import decode_rotated, pack_states, tile_positions
from glm_exl3.ref.encode_host import encode_tiles_on_host
from glm_exl3.ref.hadamard import had128
from glm_exl3.ref.quantize import (
    REFIT_ROUNDS,
    Encoder,
    Exl3Tensors,
    best_factor,
    block_factor,
    initial_scales,
    inner,
)


def quantize_datafree(
    weight: torch.Tensor,
    bits: int,
    codebook: Codebook,
    *,
    seed: int = 0,
    encoder: Encoder = encode_tiles_on_host,
) -> Exl3Tensors:
    """Quantise `weight` [k, n] at integer K; see `quantize.quantize` without a Hessian.

    Raises ValueError for sizes that are no multiple of 128 and for values that are not finite.
    """
    wide = weight.to(torch.float32)
    if any(size % HADAMARD for size in wide.shape):
        raise ValueError(f"dims must be multiples of {HADAMARD}: {tuple(wide.shape)}")
    if not torch.isfinite(wide).all():
        raise ValueError("weights to quantise must be finite")
    packed = initial_scales(wide, codebook, seed)
    factor = best_factor(inner(wide, packed), bits, codebook, encoder)
    packed = replace(packed, suh=packed.suh / factor)
    packed = replace(packed, trellis=_encode(inner(wide, packed), packed, bits, encoder))
    for _ in range(REFIT_ROUNDS):
        packed = _refit(wide, packed)
    return packed


def _feedback(suh: torch.Tensor) -> torch.Tensor:
    """Unit lower block factors fp32 [k/128, 128, 128] of H diag(suh^2) H, block by block."""
    square = torch.diag_embed(suh.to(torch.float64).square().reshape(-1, HADAMARD))
    factors = []
    for block in square:
        rotated = had128(had128(block, dim=0), dim=1)
        factors.append(block_factor(rotated / rotated.diagonal().mean()))
    return torch.stack(factors).to(torch.float32)


def _encode(target: torch.Tensor, packed: Exl3Tensors, bits: int, encoder: Encoder) -> torch.Tensor:
    """[k, n] of the inner matrix -> trellis int16 [k/16, n/16, 16K]; the last rows of all strips
    first, so that a GPU gets many tiles at once."""
    strips = target.reshape(-1, HADAMARD, target.shape[1])
    lower, errors = _feedback(packed.suh), torch.zeros_like(strips)
    table = codebook_table(packed.codebook).to(torch.float32).to(target.device)
    trellis = []
    for start in range(HADAMARD - TILE, -1, -TILE):
        rows, behind = slice(start, start + TILE), slice(start + TILE, None)
        wanted = strips[:, rows] + lower[:, behind, rows].transpose(1, 2) @ errors[:, behind]
        states = encoder(_to_tiles(wanted), bits, packed.codebook)
        decoded = _from_tiles(table[states.to(torch.int64)], wanted.shape)
        errors[:, rows] = strips[:, rows] - decoded
        packed_rows = pack_states(states, TILE * bits)
        trellis.append(packed_rows.reshape(strips.shape[0], -1, TILE * bits))
    return torch.stack(trellis[::-1], dim=1).flatten(0, 1)


def _to_tiles(rows: torch.Tensor) -> torch.Tensor:
    """[strips, 16, n] -> [strips * n/16, 256] in element order."""
    strips, _, n = rows.shape
    grid = rows.reshape(strips, TILE, n // TILE, TILE).transpose(1, 2).reshape(-1, TILE_ELEMENTS)
    return grid[:, tile_positions().to(rows.device)]


def _from_tiles(tiles: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `_to_tiles`."""
    strips, _, n = shape
    grid = torch.empty_like(tiles)
    grid[:, tile_positions().to(tiles.device)] = tiles
    return grid.reshape(strips, n // TILE, TILE, TILE).transpose(1, 2).reshape(shape)


def _refit(weight: torch.Tensor, packed: Exl3Tensors) -> Exl3Tensors:
    """Least-squares svh for this suh, then suh for that svh."""
    values = decode_rotated(packed.trellis, packed.codebook).to(torch.float32)
    rotated = had128(had128(values, dim=0), dim=1)
    base = rotated * packed.suh.to(torch.float32)[:, None]
    svh = (base * weight).sum(0) / base.square().sum(0).clamp_min(1e-30)
    svh = svh.to(torch.float16)
    scaled = rotated * svh.to(torch.float32)
    suh = (scaled * weight).sum(1) / scaled.square().sum(1).clamp_min(1e-30)
    return replace(packed, suh=suh.to(torch.float16), svh=svh)
