"""The reference back end: `glm_exl3.ref` behind the interface of the back-end table.

On CUDA it decodes at every call, which is slow and meant for comparison. On the CPU the caller
decodes once when loading ends (`dense_on_load`) and multiplies with `dense_linear` and `dense_moe`;
those round the decoded matrix to the activation dtype, exactly what a checkpoint of dequantised
bf16 weights would hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from glm_exl3.format.layout import Codebook
from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix
from glm_exl3.ref import hadamard
from glm_exl3.ref.decode import dequantize
from glm_exl3.ref.encode_host import encode_tiles_on_host
from glm_exl3.ref.linear import exl3_linear, exl3_parts_apart
from glm_exl3.ref.moe import exl3_moe, swiglu_clamped

FEW_ROWS = 4


def linear(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """x [..., k] -> [..., n] in x.dtype; fp32 inside."""
    return exl3_linear(x, matrix.trellis, matrix.suh, matrix.svh, matrix.codebook)


def parts(
    x: torch.Tensor, matrices: Sequence[PackedMatrix | torch.Tensor], limit: float | None = None
) -> torch.Tensor:
    """The products side by side, or with a `limit` the clamped SwiGLU of gate and up."""
    products = [
        F.linear(x, matrix) if isinstance(matrix, torch.Tensor) else linear(x, matrix)
        for matrix in matrices
    ]
    return exl3_parts_apart(products, limit)


def side_by_side(
    x: torch.Tensor, matrices: Sequence[PackedMatrix | torch.Tensor], own_rows: bool = False
) -> torch.Tensor:
    """The products side by side; dense ones are torch's whatever `own_rows` says."""
    return parts(x, matrices)


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


def had128(
    x: torch.Tensor, pre: torch.Tensor | None = None, post: torch.Tensor | None = None
) -> torch.Tensor:
    """had128(x * pre) * post over the last dimension, fp32 inside, x.dtype out; scales fp16."""
    scaled = x.float() if pre is None else x.float() * pre.float()
    rotated = hadamard.had128(scaled)
    return (rotated if post is None else rotated * post.float()).to(x.dtype)


def encode(tiles: torch.Tensor, bits: int, codebook: Codebook) -> torch.Tensor:
    """tiles [..., 256] -> states int32 [..., 256], a closed ring per tile."""
    return encode_tiles_on_host(tiles, bits, codebook)


def widen(weight: torch.Tensor) -> torch.Tensor | None:
    """An fp32 copy of a bf16 weight for products with few rows; None where it would not pay.

    On x86 CPUs a bf16 product of one row costs more than twice the fp32 one, from about eight rows
    on it is the other way round; the values are the same and so is the fp32 accumulation.
    """
    pays = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return weight.float() if pays else None


def dense_linear(
    x: torch.Tensor, weight: torch.Tensor, wide: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., k] with a decoded weight [n, k] -> [..., n] in x.dtype; `wide` is `widen(weight)`."""
    if wide is not None and x.numel() <= FEW_ROWS * x.shape[-1]:
        return F.linear(x.float(), wide).to(x.dtype)
    return F.linear(x, weight)


@dataclass(frozen=True)
class DenseStack:
    """Decoded experts [E, n, k] and, where it pays, their fp32 copy."""

    weight: torch.Tensor
    wide: torch.Tensor | None

    def product(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """x [..., k] with one expert's weight."""
        wide = None if self.wide is None else self.wide[expert]
        return dense_linear(x, self.weight[expert], wide)


def dense_experts(stack: Exl3Stack, dtype: torch.dtype) -> DenseStack:
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
    weight = torch.stack(matrices)
    return DenseStack(weight, widen(weight))


def _grouped(ids: torch.Tensor) -> dict[int, list[tuple[int, int]]]:
    """(token, slot) pairs by expert id, ascending; negative ids are left out."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for token, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            if expert >= 0:
                groups.setdefault(expert, []).append((token, slot))
    return dict(sorted(groups.items()))


def dense_moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: DenseStack,
    w2: DenseStack,
    limit: float | None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Routed sum [T, H] with decoded experts: w13 [E, 2I, H], w2 [E, H, I].

    Tokens are grouped by expert in ascending order, whatever the batch; the sum over experts is
    kept in fp32 and rounded once. Grouping happens in Python, which for the few tokens of a decode
    step is faster than tensor operations.
    """
    local = topk_ids.to(torch.int64)
    if expert_map is not None:
        local = expert_map.to(torch.int64)[local]
    weights = topk_weights.to(torch.float32)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, members in _grouped(local).items():
        pairs = torch.tensor(members, device=x.device)
        tokens, slots = pairs[:, 0], pairs[:, 1]
        chosen = x if x.shape[0] == 1 else x[tokens]
        gate, up = w13.product(chosen, expert).chunk(2, dim=-1)
        routed = w2.product(swiglu_clamped(gate, up, limit), expert).to(torch.float32)
        out.index_add_(0, tokens, routed * weights[tokens, slots, None])
    return out.to(x.dtype)
