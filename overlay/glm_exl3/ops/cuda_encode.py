"""The trellis encoder on CUDA: `glm_exl3.ref.encode.encode_tiles` with the same bits out.

The kernel keeps one history of `best` per tile in flight, 4 MiB at four bits, so the scratch memory
is bounded by the number of multiprocessors, not by the number of tiles.
"""

from __future__ import annotations

import torch

from glm_exl3.format.layout import TILE_ELEMENTS, Codebook
from glm_exl3.ops import ext
from glm_exl3.ref.codebook import codebook_table


def encode_tiles(tiles: torch.Tensor, bits: int, codebook: Codebook) -> torch.Tensor:
    """tiles [..., 256] on a CUDA device -> states int32 [..., 256], a closed ring per tile.

    `bits` is 1..8. Raises ValueError for other rates or values that are not finite.
    """
    if bits not in range(1, 9):
        raise ValueError(f"K must be an integer from 1 to 8, got {bits}")
    if not torch.isfinite(tiles).all():
        raise ValueError("values to encode must be finite")
    ops = ext.operators()
    flat = tiles.reshape(-1, TILE_ELEMENTS).to(torch.float32).contiguous()
    blocks = torch.cuda.get_device_properties(tiles.device).multi_processor_count
    floats = ops.encode_workspace(flat.shape[0], bits, blocks)
    workspace = torch.empty(floats, dtype=torch.float32, device=tiles.device)
    states = torch.empty(flat.shape, dtype=torch.int32, device=tiles.device)
    table = codebook_table(codebook).to(tiles.device)
    ops.encode(flat, table, bits, workspace, states)
    return states.reshape(tiles.shape)
