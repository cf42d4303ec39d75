"""The reference back end: `glm_exl3.ref` behind the interface of the back-end table.

On CUDA it decodes at every call, which is slow and meant for comparison. On the CPU the caller
decodes once when loading ends (`dense_on_load`) and multiplies with `dense_linear` and `dense_moe`;
those round the decoded matrix to the activation dtype, exactly what a checkpoint of dequantised
bf16 weights would hold.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix
from glm_exl3.ref.decode import dequantize
from glm_exl3.ref.linear import exl3_linear
from glm_exl3.ref.moe import exl3_moe, swiglu_clamped


def linear(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """x [..., k] -> [..., n] in x.dtype; fp32 inside."""
    return exl3_linear(x, matrix.trellis, matrix.suh, matrix.svh, matrix.codebook)


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: Exl3Stack,
    w2: Exl3Stack,
    limit: float | None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Routed sum [T, H] over the experts of this rank."""
    return exl3_moe(x, topk_ids, topk_weights, w13, w2, limit, expert_map)


def dequant(matrix: PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """W [k, n], decoded in fp32 and rounded once to `dtype`."""
    return dequantize(matrix.trellis, matrix.suh, matrix.svh, matrix.codebook).to(dtype)


def dense_experts(stack: Exl3Stack, dtype: torch.dtype) -> torch.Tensor:
    """Decode a stack into F.linear layout: [E, n, k], or [E, 2n, k] with gate above up."""
    count = stack.trellis.shape[0]
    halves = (0, 1) if stack.trellis.dim() == 5 else (None,)
    matrices = []
    for expert in range(count):
        rows = []
        for half in halves:
            at = (expert,) if half is None else (expert, half)
            weight = dequantize(stack.trellis[at], stack.suh[at], stack.svh[at], stack.codebook)
            rows.append(weight.t().to(dtype))
        matrices.append(torch.cat(rows))
    return torch.stack(matrices) if matrices else stack.suh.new_empty((0, 0, 0), dtype=dtype)


def dense_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., k] with a decoded weight [n, k]."""
    return F.linear(x, weight, bias)


def dense_moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float | None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Routed sum [T, H] with decoded experts: w13 [E, 2I, H], w2 [E, H, I].

    Tokens are grouped by expert; the sum over experts is kept in fp32 and rounded once.
    """
    local = topk_ids.to(torch.int64)
    if expert_map is not None:
        local = expert_map.to(torch.int64)[local]
    weights = topk_weights.to(torch.float32)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(local).tolist():
        if expert < 0:
            continue
        tokens, slots = torch.where(local == expert)
        gate, up = F.linear(x[tokens], w13[expert]).chunk(2, dim=-1)
        hidden = swiglu_clamped(gate, up, limit)
        routed = F.linear(hidden, w2[expert]).to(torch.float32)
        out.index_add_(0, tokens, routed * weights[tokens, slots, None])
    return out.to(x.dtype)
