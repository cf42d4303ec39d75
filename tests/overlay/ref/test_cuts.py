"""Cut matrices: columns concatenate, rows sum, padding adds zeros, fused thirds stay fused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_exl3.format.layout import HALF_LAST_DIMS, INTEGER_LAST_DIMS, TILE, Codebook
from glm_exl3.format.sharding import Cut, block_cuts
from glm_exl3.ref.decode import dequantize
from glm_exl3.ref.linear import exl3_linear

Matrix = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
RATES = st.sampled_from(INTEGER_LAST_DIMS + HALF_LAST_DIMS)
RANKS = st.integers(1, 4)
# A product of another width may run through another kernel of the CPU, which adds in another order.
ROUNDING = 1e-12


def random_matrix(k: int, n: int, last_dim: int, seed: int) -> Matrix:
    generator = torch.Generator().manual_seed(seed)
    shape = (k // TILE, n // TILE, last_dim)
    trellis = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16)
    suh, svh = (torch.randn(size, generator=generator).to(torch.float16) for size in (k, n))
    return trellis, suh, svh


def cut(matrix: Matrix, side: int, at: Cut) -> Matrix:
    """The rank's part, on rows (side 0) or columns (side 1), padded with zero scales."""
    trellis, scales = matrix[0], list(matrix[1:])
    tiles = slice(at.start // TILE, at.stop // TILE)
    part = trellis[tiles] if side == 0 else trellis[:, tiles]
    padding = [part.shape[0], part.shape[1], part.shape[2]]
    padding[side] = at.padding // TILE
    junk = torch.full(padding, 0x5A5A, dtype=torch.int16)
    zeros = torch.zeros(at.padding, dtype=torch.float16)
    scales[side] = torch.cat([scales[side][at.start : at.stop], zeros])
    return torch.cat([part, junk], dim=side), scales[0], scales[1]


def values(matrix: Matrix) -> torch.Tensor:
    return dequantize(*matrix, Codebook.MUL1, torch.float64)


@given(blocks=st.integers(4, 7), ranks=RANKS, last_dim=RATES, equal=st.booleans())
@settings(max_examples=12)
def test_column_cuts_concatenate_to_the_whole(
    blocks: int, ranks: int, last_dim: int, equal: bool
) -> None:
    matrix = random_matrix(128, 128 * blocks, last_dim, seed=blocks)
    parts = []
    for at in block_cuts(128 * blocks, ranks, equal=equal):
        part = values(cut(matrix, 1, at))
        assert part.shape == (128, at.padded)
        assert not part[:, at.width :].any()
        parts.append(part[:, : at.width])
    assert torch.allclose(torch.cat(parts, dim=1), values(matrix), rtol=0, atol=ROUNDING)


@given(blocks=st.integers(4, 7), ranks=RANKS, last_dim=RATES, equal=st.booleans())
@settings(max_examples=12)
def test_row_cuts_sum_to_the_whole(blocks: int, ranks: int, last_dim: int, equal: bool) -> None:
    size = 128 * blocks
    matrix = random_matrix(size, 128, last_dim, seed=blocks)
    x = torch.randn(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(3, 128, dtype=torch.float64)
    for at in block_cuts(size, ranks, equal=equal):
        mine = torch.nn.functional.pad(x[:, at.start : at.stop], (0, at.padding), value=7.0)
        total += exl3_linear(mine, *cut(matrix, 0, at), Codebook.MUL1)
    assert torch.allclose(total, x @ values(matrix), atol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_fused_thirds_are_cut_by_heads_and_joined(ranks: int) -> None:
    """q, k and v of one tensor: each third is cut alike, the parts stay one matrix."""
    heads = 3
    matrix = random_matrix(128, 3 * heads * 128, 64, seed=0)
    thirds = values(matrix).reshape(128, 3, heads * 128)
    for at in block_cuts(heads * 128, ranks):
        offsets = [third * heads * 128 for third in range(3)]
        cuts = [Cut(at.start + o, at.stop + o, at.width) for o in offsets]
        parts = [cut(matrix, 1, part) for part in cuts]
        trellis = torch.cat([part[0] for part in parts], dim=1)
        joined = (trellis, matrix[1], torch.cat([part[2] for part in parts]))
        expected = thirds[:, :, at.start : at.stop].reshape(128, -1)
        assert torch.allclose(values(joined), expected, rtol=0, atol=ROUNDING)
