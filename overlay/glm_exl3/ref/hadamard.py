"""The Hadamard-128 rotation on both sides of every EXL3 matrix."""

from __future__ import annotations

from functools import cache

import torch

from glm_exl3.format.layout import HADAMARD


@cache
def hadamard_matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[128, 128]: (-1)^popcount(i & j) / sqrt(128) at (i, j); symmetric, its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < HADAMARD:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)]
        )
    return (matrix / HADAMARD**0.5).to(dtype)


def had128(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Rotate every block of 128 along `dim`, in fp32 (fp64 stays fp64).

    Any shape whose size along `dim` is a multiple of 128; returns fp32 (or fp64), same shape.
    """
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    moved = x.to(dtype).movedim(dim, -1)
    blocks = moved.reshape(*moved.shape[:-1], moved.shape[-1] // HADAMARD, HADAMARD)
    rotated = blocks @ hadamard_matrix(dtype).to(x.device)
    return rotated.reshape(moved.shape).movedim(-1, dim)
