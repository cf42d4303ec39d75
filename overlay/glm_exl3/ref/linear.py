"""y = x @ W on a packed matrix, in the form that every kernel uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from glm_exl3.format.layout import Codebook
from glm_exl3.ref.decode import channel_scales, decode_rotated
from glm_exl3.ref.hadamard import had128


def exl3_linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: Codebook,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """had128(had128(x * suh) @ What) * svh + bias: x [..., k] -> [..., n] in x.dtype.

    The arithmetic is fp32, or fp64 for fp64 inputs.
    """
    work = torch.float64 if x.dtype is torch.float64 else torch.float32
    rotated = had128(x.to(work) * channel_scales(suh).to(work))
    inner = decode_rotated(trellis, codebook).to(work)
    out = had128(rotated @ inner) * channel_scales(svh).to(work)
    if bias is not None:
        out = out + bias.to(work)
    return out.to(x.dtype)


def exl3_parts_apart(products: Sequence[torch.Tensor], limit: float | None = None) -> torch.Tensor:
    """Products [..., n] of the same tokens as one tensor: side by side in order.

    With a `limit` (infinity: no clamp) the two are gate and up and the result is their clamped
    SwiGLU [..., n], in fp32 from what their type holds, rounded once.
    """
    if limit is None:
        return torch.cat(list(products), dim=-1)
    gate, up = (product.float() for product in products)
    gated = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return gated.to(products[0].dtype)
