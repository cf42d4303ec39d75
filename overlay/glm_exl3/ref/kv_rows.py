"""Rows of the latent cache: how `format.kv`'s layouts are written and read.

What: latents `[n, 512]` become `uint8 [n, row_bytes]` and back. Why this shape: a row is one
contiguous piece, its numbers first and its scales behind them, so a gather of selected rows needs
no second table; fp8 rows are what FlashInfer's SM120 kernel reads with arbitrary fp32 scales. int8
rows differ in their numbers only. They are not rotated: docs/kv-cache.md, "Layouts", has the
figures.

What must stay true: a row of zeros reads as zeros; the Triton writer gives the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm_exl3.format.kv import BF16, FP8, LATENT, RowLayout

E4M3_MAX = 448.0
INT8_MAX = 127.0
MIN_SCALE = 2.0**-40
"""Of a group of zeros; far below what a normalised latent holds."""


def write_rows(latents: Tensor, layout: RowLayout) -> Tensor:
    """Latents `[..., 512]` of any float type, as bf16 first, -> rows `uint8 [..., row_bytes]`."""
    stored = latents.to(torch.bfloat16).contiguous()
    if layout is BF16:
        return stored.view(torch.uint8)
    groups = stored.float().unflatten(-1, (layout.scales, layout.group))
    limit = E4M3_MAX if layout is FP8 else INT8_MAX
    scales = (groups.abs().amax(-1) * (1.0 / limit)).clamp_min(MIN_SCALE)
    scaled = (groups / scales[..., None]).clamp(-limit, limit)
    numbers = scaled.to(torch.float8_e4m3fn) if layout is FP8 else scaled.round().to(torch.int8)
    return torch.cat([numbers.view(torch.uint8).flatten(-2), scales.view(torch.uint8)], dim=-1)


def read_rows(rows: Tensor, layout: RowLayout) -> Tensor:
    """Rows `uint8 [..., row_bytes]` -> fp32 `[..., 512]`."""
    if layout is BF16:
        return rows.contiguous().view(torch.bfloat16).float()
    numbers = rows[..., :LATENT].contiguous()
    kind = torch.float8_e4m3fn if layout is FP8 else torch.int8
    groups = numbers.view(kind).float().unflatten(-1, (layout.scales, layout.group))
    scales = rows[..., LATENT:].contiguous().view(torch.float32)
    return (groups * scales[..., None]).flatten(-2)
