"""Take a direction out of weights or activations.

`weight`: W' = (I - alpha r r^T) W, for a matrix whose output has the direction r. Every column of W
is treated alone, so columns may be divided among ranks. `streams`: s' = s - alpha (s . d) d for the
residual streams of one token, read as one vector. With alpha = 1 the component is gone; with more
it changes sign. All arithmetic is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEEDBACK_ROWS = 256
ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def weight(matrix: Tensor, direction: Tensor, alpha: float) -> Tensor:
    """matrix [n, k], direction [n] of unit length in fp32; [n, k] in the dtype of `matrix`.

    Rounding alone would leave 1 % of the component at n = 4096 in bf16: most changes are smaller
    than half a unit in the last place and vanish together. So the rows with the largest share of
    the direction are then moved by at most one unit each, one after the other, to take up what is
    left.
    """
    wide = matrix.float()
    unit = direction.to(wide.device)
    exact = wide - alpha * torch.outer(unit, unit @ wide)
    rounded = exact.to(matrix.dtype)
    if matrix.dtype not in ULP:
        return rounded
    error = unit @ (rounded.float() - exact)
    shares = unit.abs().topk(min(FEEDBACK_ROWS, unit.numel()))
    for row in shares.indices[shares.values > 0].tolist():
        now = rounded[row].float()
        reach = now.abs() * ULP[matrix.dtype]
        moved = (now - error / unit[row]).clamp(now - reach, now + reach).to(matrix.dtype)
        error += unit[row] * (moved.float() - now)
        rounded[row] = moved
    return rounded


def streams(residual: Tensor, direction: Tensor, scaled: Tensor) -> Tensor:
    """residual [T, N, H]; direction fp32 [N * H] of unit length, scaled = alpha * direction.

    Both are tensors, so the result follows them inside a captured graph. [T, N, H] in the dtype of
    `residual`.
    """
    flat = residual.flatten(1).float()
    component = flat @ direction
    changed = torch.addcmul(flat, component.unsqueeze(1), scaled.unsqueeze(0), value=-1.0)
    return changed.view(residual.shape).to(residual.dtype)


def unit(direction: Tensor) -> Tensor:
    """The direction in fp32 with length 1; computed in fp64. Raises ValueError without a length."""
    wide = direction.double().flatten()
    length = wide.norm()
    if not bool(torch.isfinite(length)) or float(length) == 0:
        raise ValueError("the direction has no length, or values that are not finite")
    return (wide / length).float()


def relative_change(before: Tensor, after: Tensor) -> float:
    """Frobenius norm of the difference over that of `before`."""
    old = before.float()
    return float((after.float() - old).norm() / old.norm().clamp_min(1e-30))
