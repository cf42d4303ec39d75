"""The made-up donor and vector of the measuring program are ones that the plugin takes."""

from __future__ import annotations

from pathlib import Path

from e2e import edits_load
from glm_exl3.format.donor import parse_layers
from glm_exl3.quant import glp
from glm_exl3.quant.ablit import Projection, Transplant


def test_the_matrices_are_those_of_the_model() -> None:
    wanted = edits_load.matrices(parse_layers("15-45"))
    assert len(wanted) == 31
    assert {one.shape for one in wanted} == {(4096, 8192), (4096, 16384)}
    assert wanted[-1] == edits_load.Matrix(45, (4096, 16384))
    assert sum(2 * one.shape[0] * one.shape[1] for one in wanted) == 2560 << 20


def test_donor_and_vector_are_read(tmp_path: Path) -> None:
    small = [edits_load.Matrix(layer, (64, 128)) for layer in (3, 4)]
    edits_load.make_donor(tmp_path / "donor", small)
    donor = Transplant.open(tmp_path / "donor")
    direction = tmp_path / "r.safetensors"
    edits_load.make_direction(direction, 64)
    for method in (donor, Projection.open(direction, 1.0)):
        assert edits_load.edit_seconds(method, small, 1, 2, donor) > 0
    edits_load.make_vector(tmp_path / "v.gguf", layers=3, width=32)
    request = glp.Request(tmp_path / "v.gguf", (1, 2, 3), alpha=2.0)
    assert glp.load(request, streams=4, hidden=8, layers=5).layers == (1, 2, 3)
