"""The compiled encoder returns the bits of the reference."""

from __future__ import annotations

import pytest
import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ref.encode import encode_tiles
from glm_exl3.ref.encode_host import HOST_BITS, encode_tiles_on_host


@pytest.mark.parametrize("bits", HOST_BITS)
@pytest.mark.parametrize("codebook", list(Codebook), ids=lambda c: c.value)
def test_states_are_those_of_the_reference(codebook: Codebook, bits: int) -> None:
    tiles = 1.1 * torch.randn(2, 256, generator=torch.Generator().manual_seed(bits))
    expected = encode_tiles(tiles, bits, codebook)
    states = encode_tiles_on_host(tiles, bits, codebook)
    assert states.dtype is expected.dtype
    assert torch.equal(states, expected)


def test_ties_go_to_the_lowest_state_in_both() -> None:
    tiles = torch.zeros(1, 256)
    tiles[0, 100:] = 10.0
    expected = encode_tiles(tiles, 3, Codebook.MUL1)
    assert torch.equal(encode_tiles_on_host(tiles, 3, Codebook.MUL1), expected)


def test_threads_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    one = encode_tiles_on_host(tiles, 4, Codebook.MCG)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(encode_tiles_on_host(tiles, 4, Codebook.MCG), one)


def test_leading_dimensions_are_kept() -> None:
    tiles = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0))
    states = encode_tiles_on_host(tiles, 5, Codebook.MCG)
    assert torch.equal(states[1, 2], encode_tiles_on_host(tiles[1, 2], 5, Codebook.MCG))
    assert encode_tiles_on_host(tiles[:0], 5, Codebook.MCG).shape == (0, 3, 256)


@pytest.mark.parametrize(("bits", "value"), [(0, 1.0), (9, 1.0), (4, float("inf"))])
def test_what_cannot_be_encoded_is_refused(bits: int, value: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        encode_tiles_on_host(torch.full((1, 256), value), bits, Codebook.MCG)


def test_without_numba_the_reference_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm_exl3.ref.encode_host.find_spec", lambda name: None)
    monkeypatch.setattr("glm_exl3.ref.encode_host._compiled", None)
    tiles = torch.zeros(1, 256)
    expected = encode_tiles(tiles, 8, Codebook.MCG)
    assert torch.equal(encode_tiles_on_host(tiles, 8, Codebook.MCG), expected)
    assert encode_tiles_on_host(tiles, 4, Codebook.MCG).shape == (1, 256)
