"""Bits to states to weights: closed rings, the stated permutation, exact cuts, stable values."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3.format.layout import HALF_LAST_DIMS, INTEGER_LAST_DIMS, Codebook, step_ends
from glm_exl3.ref.codebook import codebook_table
from glm_exl3.ref.decode import (
    channel_scales,
    decode_rotated,
    dequantize,
    pack_states,
    tile_positions,
    unpack_states,
)
from glm_exl3.ref.hadamard import had128, hadamard_matrix
from glm_exl3.ref.linear import exl3_linear

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
RATES = INTEGER_LAST_DIMS + HALF_LAST_DIMS


def random_trellis(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16)


def random_matrix(k: int, n: int, last_dim: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed + 1)
    suh = torch.randn(k, generator=generator).to(torch.float16)
    svh = torch.randn(n, generator=generator).to(torch.float16)
    return random_trellis(k // 16, n // 16, last_dim, seed=seed), suh, svh


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@given(last_dim=st.sampled_from(RATES), seed=st.integers(0, 1000))
def test_packing_inverts_unpacking(last_dim: int, seed: int) -> None:
    trellis = random_trellis(2, 3, last_dim, seed=seed)
    assert torch.equal(pack_states(unpack_states(trellis), last_dim), trellis)


@pytest.mark.parametrize("last_dim", RATES)
def test_a_state_is_the_last_one_shifted_by_the_bits_of_its_step(last_dim: int) -> None:
    states = unpack_states(random_trellis(4, last_dim)).to(torch.int64)
    ends = (0, *step_ends(last_dim))
    for index in range(256):
        step = ends[index + 1] - ends[index]
        shifted = (states[:, index - 1] << step) & 0xFFFF
        assert torch.equal(shifted >> step << step, states[:, index] >> step << step)


def test_packing_refuses_states_that_do_not_close() -> None:
    states = unpack_states(random_trellis(1, 64))
    states[0, 10] ^= 1 << 15
    with pytest.raises(ValueError, match="closed ring"):
        pack_states(states, 64)


def test_tile_positions_are_a_permutation_in_fragment_order() -> None:
    positions = tile_positions()
    assert sorted(positions.tolist()) == list(range(256))
    for element, row, column in ((0, 0, 0), (1, 1, 0), (2, 8, 0), (4, 0, 8), (8, 2, 0), (32, 0, 1)):
        assert positions[element] == row * 16 + column


@pytest.mark.parametrize(
    ("codebook", "std"), [("3inst", 1.24371), ("mcg", 1.24411), ("mul1", 1.00031)]
)
def test_codebooks_have_the_documented_spread(codebook: str, std: float) -> None:
    assert codebook_table(Codebook(codebook)).double().std().item() == pytest.approx(std, abs=1e-4)


@pytest.mark.parametrize("name", GOLDEN["tables"])
def test_tables_are_stable(name: str) -> None:
    assert digest(codebook_table(Codebook(name))) == GOLDEN["tables"][name]


@pytest.mark.parametrize("rate", GOLDEN["matrices"])
def test_decoded_matrices_are_stable(rate: str) -> None:
    trellis = random_trellis(8, 8, int(rate), seed=7)
    assert digest(decode_rotated(trellis, Codebook.MUL1)) == GOLDEN["matrices"][rate]


def test_the_rotation_is_its_own_inverse_and_natural_order() -> None:
    matrix = hadamard_matrix(torch.float64)
    assert torch.allclose(matrix @ matrix, torch.eye(128, dtype=torch.float64), atol=1e-12)
    assert matrix[3, 5] * 128**0.5 == pytest.approx((-1) ** (3 & 5).bit_count())
    x = torch.randn(3, 256, 5, dtype=torch.float64)
    assert torch.allclose(had128(had128(x, dim=1), dim=1), x, atol=1e-12)


@given(last_dim=st.sampled_from(RATES), seed=st.integers(0, 100))
def test_activation_form_equals_the_dequantised_matrix(last_dim: int, seed: int) -> None:
    trellis, suh, svh = random_matrix(256, 128, last_dim, seed)
    x = torch.randn(5, 256, dtype=torch.float64)
    weight = dequantize(trellis, suh, svh, Codebook.MUL1, torch.float64)
    out = exl3_linear(x, trellis, suh, svh, Codebook.MUL1)
    assert torch.allclose(out, x @ weight, atol=1e-9)


def test_cuts_at_128_are_exact() -> None:
    trellis, suh, svh = random_matrix(384, 256, 64)
    whole = dequantize(trellis, suh, svh, Codebook.MCG, torch.float64)
    columns = dequantize(trellis[:, 8:], suh, svh[128:], Codebook.MCG, torch.float64)
    assert torch.equal(columns, whole[:, 128:])
    x = torch.randn(4, 384, dtype=torch.float64)
    parts = sum(
        exl3_linear(x[:, a:b], trellis[a // 16 : b // 16], suh[a:b], svh, Codebook.MCG)
        for a, b in ((0, 128), (128, 384))
    )
    assert torch.allclose(parts, x @ whole, atol=1e-9)


def test_zero_scales_add_exact_zeros() -> None:
    trellis, suh, svh = random_matrix(256, 256, 48)
    suh[128:], svh[128:] = 0, 0
    weight = dequantize(trellis, suh, svh, Codebook.MUL1)
    assert not weight[128:].any()
    assert not weight[:, 128:].any()


@given(words=st.lists(st.integers(-(1 << 15), (1 << 15) - 1), min_size=8, max_size=8))
def test_sign_words_are_bits_of_their_channels(words: list[int]) -> None:
    scales = channel_scales(torch.tensor(words, dtype=torch.int16))
    expected = [-1.0 if (word >> bit) & 1 else 1.0 for word in words for bit in range(16)]
    assert scales.tolist() == expected
    assert scales.dtype is torch.float16
