"""The encoder returns the nearest closed ring and the quantiser uses it well."""

from __future__ import annotations

import pytest
import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ref.codebook import codebook_table
from glm_exl3.ref.decode import codebook_values, dequantize, pack_states, unpack_states
from glm_exl3.ref.encode import encode_tiles
from glm_exl3.ref.encode_host import encode_tiles_on_host
from glm_exl3.ref.quantize import from_tiles, pad_to_blocks, quantize, quantize_group, to_tiles

BEST_MSE = {2: 0.068, 3: 0.0175, 4: 0.0045}
BEST_FACTOR = {2: 0.97, 3: 0.94, 4: 0.91}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    encode_tiles_on_host(torch.zeros(1, 256), 4, Codebook.MCG)


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm_exl3.ref.quantize.SEARCH_TILES", 8)


def random_states(tiles: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 15), 1 << 15, (tiles, 16 * bits), generator=generator)
    return unpack_states(words.to(torch.int16))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("codebook", list(Codebook), ids=lambda c: c.value)
def test_decoded_values_are_encoded_to_themselves(codebook: Codebook, bits: int) -> None:
    states = random_states(1, bits)
    values = codebook_values(states, codebook).float()
    encoded = encode_tiles(values, bits, codebook)
    assert torch.equal(codebook_values(encoded, codebook).float(), values)
    pack_states(encoded, 16 * bits)


def test_batches_do_not_change_the_result() -> None:
    tiles = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    one = encode_tiles(tiles, 4, Codebook.MCG, batch=1)
    assert torch.equal(one, encode_tiles(tiles, 4, Codebook.MCG, batch=3))


def test_no_other_ring_nearby_is_closer() -> None:
    tile = torch.randn(1, 256, generator=torch.Generator().manual_seed(3))
    states = encode_tiles(tile, 2, Codebook.MCG)
    words = pack_states(states, 32)
    table = codebook_table(Codebook.MCG).float()
    best = (table[states.long()] - tile).square().sum()
    for bit in range(0, 512, 7):
        changed = words.clone()
        changed[0, bit // 16] ^= torch.tensor(1 << (bit % 16)).to(torch.int16)
        other = table[unpack_states(changed).long()]
        assert (other - tile).square().sum() >= best - 1e-4


@pytest.mark.parametrize("codebook", [Codebook.MCG, Codebook.MUL1], ids=lambda c: c.value)
@pytest.mark.parametrize("bits", BEST_MSE)
def test_error_on_normal_values_is_that_of_the_format(codebook: Codebook, bits: int) -> None:
    tiles = torch.randn(64, 256, generator=torch.Generator().manual_seed(bits))
    tiles /= tiles.square().mean().sqrt()
    scaled = tiles * BEST_FACTOR[bits] * codebook_table(codebook).float().std()
    states = encode_tiles_on_host(scaled, bits, codebook)
    error = (codebook_values(states, codebook).float() - scaled).square().mean()
    assert float(error / scaled.square().mean()) == pytest.approx(BEST_MSE[bits], rel=0.05)


@pytest.mark.parametrize(("bits", "values"), [(0, 1.0), (9, 1.0), (4, float("nan"))])
def test_what_cannot_be_encoded_is_refused(bits: int, values: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        encode_tiles(torch.full((1, 256), values), bits, Codebook.MCG)


def test_tiles_are_a_permutation_of_their_rows() -> None:
    rows = torch.arange(16 * 48.0).reshape(16, 48)
    assert torch.equal(from_tiles(to_tiles(rows)), rows)


def heavy_tailed(k: int, n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp(0.7 * torch.randn(k, 1, generator=generator))
    return torch.randn(k, n, generator=generator) * rows


def relative_error(weight: torch.Tensor, decoded: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (decoded - weight)).norm() / (x @ weight).norm())


def test_a_hessian_lowers_the_error_of_the_outputs() -> None:
    weight = heavy_tailed(128, 128)
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(128, 128, generator=generator) * torch.exp(-torch.arange(128) / 30.0)
    x = torch.randn(1024, 128, generator=generator) @ mixing
    errors = []
    for hessian in (None, x.t() @ x):
        packed = quantize(weight, 3, Codebook.MUL1, hessian=hessian)
        decoded = dequantize(packed.trellis, packed.suh, packed.svh, packed.codebook)
        errors.append(relative_error(weight, decoded, x))
    assert errors[1] < 0.75 * errors[0]
    assert errors[0] < 0.16


def test_a_group_shares_suh_and_the_seed_fixes_the_bytes() -> None:
    weights = [heavy_tailed(128, 128, seed) for seed in (1, 2)]
    gate, up = quantize_group(weights, 4, Codebook.MCG, seed=5)
    assert torch.equal(gate.suh, up.suh)
    assert not torch.equal(gate.trellis, up.trellis)
    again, _ = quantize_group(weights, 4, Codebook.MCG, seed=5)
    assert torch.equal(again.trellis, gate.trellis)
    for weight, packed in zip(weights, (gate, up), strict=True):
        decoded = dequantize(packed.trellis, packed.suh, packed.svh, packed.codebook)
        assert float((decoded - weight).norm() / weight.norm()) < 0.08
    names = set(gate.state_dict("m.gate_proj"))
    assert names == {f"m.gate_proj.{leaf}" for leaf in ("trellis", "suh", "svh", "mcg")}


def test_bad_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        quantize(torch.zeros(64, 128), 4, Codebook.MCG)
    with pytest.raises(ValueError, match="finite"):
        quantize(torch.full((128, 128), float("inf")), 4, Codebook.MCG)
    with pytest.raises(ValueError, match="calibration"):
        quantize(torch.ones(128, 128), 4, Codebook.MCG, hessian=torch.zeros(128, 128))
    assert pad_to_blocks(torch.ones(100, 130)).shape == (128, 256)
