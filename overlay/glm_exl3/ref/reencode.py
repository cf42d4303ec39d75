"""Encode a changed matrix with the scales that it had.

Scales stay, so every tile depends on its own 128 x 128 block only: a rank that encodes its part
gets the bits that the whole matrix would have there. What is lost is the fit of the scales to the
changed values, which is small where the change is.
"""

from __future__ import annotations

import torch

from glm_exl3.format.layout import HADAMARD, TILE, Codebook
from glm_exl3.ref.decode import pack_states
from glm_exl3.ref.encode_host import encode_tiles_on_host
from glm_exl3.ref.hadamard import had128
from glm_exl3.ref.quantize import Encoder, to_tiles


def reencode(
    weight: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bits: int,
    codebook: Codebook,
    encoder: Encoder = encode_tiles_on_host,
) -> torch.Tensor:
    """weight [k, n], suh fp16 [k], svh fp16 [n] -> trellis int16 [k/16, n/16, 16K].

    Channels whose scale is zero (padding) decode to zero whatever their bits are. Raises
    ValueError for values that are not finite and for rates other than K = 1..8.
    """
    inner = weight.to(torch.float32) * _inverse(suh)[:, None] * _inverse(svh)
    target = had128(had128(inner, dim=0), dim=1)
    strips = [encode_strip(strip, bits, codebook, encoder) for strip in target.split(HADAMARD)]
    return torch.cat(strips)


def encode_strip(
    strip: torch.Tensor, bits: int, codebook: Codebook, encoder: Encoder
) -> torch.Tensor:
    """Rows [16 r, n] of the inner matrix -> trellis int16 [r, n/16, 16K]."""
    tiles = torch.cat([to_tiles(rows) for rows in strip.split(TILE)])
    packed = pack_states(encoder(tiles, bits, codebook), TILE * bits)
    return packed.reshape(strip.shape[0] // TILE, strip.shape[1] // TILE, TILE * bits)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    wide = scales.to(torch.float32)
    return torch.where(wide == 0, torch.zeros_like(wide), 1 / wide)
