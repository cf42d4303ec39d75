"""Layer lists, names of output projections, and records of donors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3.format.donor import (
    RECORD,
    Donor,
    DonorTensor,
    EditError,
    output_layer,
    parse_layers,
    show_layers,
)

LAYERS = st.sets(st.integers(0, 200), min_size=1)


@given(LAYERS)
def test_layers_survive_being_shown(layers: set[int]) -> None:
    assert parse_layers(show_layers(sorted(layers))) == tuple(sorted(layers))


@pytest.mark.parametrize("text", ["", " , ", "3-1", "a", "1-", "-4", "1.5", "5-99999"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_layers(text)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.language_model.layers.15.self_attn.o_proj.weight", 15),
        ("language_model.model.layers.3.self_attn.o_proj", 3),
        ("model.layers.45.mtp_block.self_attn.o_proj", 45),
        ("model.layers.45.self_attn.o_proj", None),
        ("model.layers.15.self_attn.q_proj.weight", None),
        ("model.layers.15.self_attn.o_proj.trellis", None),
        ("model.visual.blocks.15.attn.o_proj.weight", None),
    ],
)
def test_output_projections_are_known_by_name(name: str, layer: int | None) -> None:
    assert output_layer(name, 45) == layer


def donor(*hashes: str) -> Donor:
    tensors = tuple(
        DonorTensor(layer, f"{layer}.o_proj", "BF16", (4, 2), "f", "e", 0, 16, sha256)
        for layer, sha256 in enumerate(hashes)
    )
    return Donor("a/b", "c" * 40, {"hidden_size": 4}, tensors)


def test_a_record_survives_the_disk_and_has_a_digest_when_complete(tmp_path: Path) -> None:
    half = donor("00", "")
    whole = half.with_hash(1, "11")
    assert (half.complete, half.digest, whole.complete) == (False, "", True)
    (tmp_path / RECORD).write_text(json.dumps(whole.as_json()))
    assert Donor.load(tmp_path) == whole
    assert whole.digest == donor("00", "11").digest != donor("00", "12").digest


def test_no_record_is_none_and_a_foreign_one_is_told(tmp_path: Path) -> None:
    assert Donor.load(tmp_path) is None
    (tmp_path / RECORD).write_text('{"schema": 7}')
    with pytest.raises(EditError, match="no record of a donor"):
        Donor.load(tmp_path)
