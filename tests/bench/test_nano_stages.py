from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_exl3.format.layout import Codebook
from nano.average import averaged
from nano.peer.quantiser import CALIBRATION_TOKENS, PeerQuantiser, module
from nano.schedule import ramp


def test_the_average_weighs_the_second_stage() -> None:
    first = {"model.language_model.norm.weight": torch.tensor([1.0, 2.0])}
    second = {"model.language_model.norm.weight": torch.tensor([3.0, -2.0])}
    found = averaged(first, second, 0.25)["model.language_model.norm.weight"]
    assert found.tolist() == [1.5, 1.0]


def test_the_rate_rises_holds_and_ends_annealed() -> None:
    assert ramp(0.01, 0.02, 0.4) == pytest.approx(0.5)
    assert ramp(0.3, 0.02, 0.4) == 1.0
    assert ramp(0.7, 0.02, 0.4) == pytest.approx(0.5)
    assert ramp(0.999, 0.02, 0.4) == 0.02


def test_the_peer_gets_each_matrix_with_its_own_hessian() -> None:
    seen: list[tuple[torch.Tensor, dict[str, Any], dict[str, Any]]] = []

    def quantise(weight: torch.Tensor, inputs: Any, asked: Any, keep: bool) -> Any:
        seen.append((weight, inputs, asked))
        weight.zero_(), inputs["H"].zero_()
        names = ("trellis", "suh", "svh")
        return None, 0.0, {name: torch.zeros(1) for name in names}

    weights, hessian = [torch.ones(4, 4), torch.ones(4, 4)], torch.eye(4)
    quantiser = PeerQuantiser(quantise, scaled_hessian=True)
    made = quantiser(weights, 3, Codebook.MUL1, hessian=hessian, seed=7)
    assert [part.codebook for part in made] == [Codebook.MUL1] * 2
    assert all(weight.sum() == 16 for weight in weights)
    assert hessian.trace() == 4
    for _, inputs, asked in seen:
        assert inputs["count"] == CALIBRATION_TOKENS
        assert (asked["K"], asked["mul1"], asked["scaled_hessian"]) == (3, True, True)
    with pytest.raises(ValueError, match="Hessian"):
        quantiser(weights, 3, Codebook.MUL1)


def test_a_stand_in_package_finds_its_parts(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("VALUE = 3\n")
    try:
        module("standin", tmp_path)
        import standin.part as part  # type: ignore[import-not-found]

        assert part.VALUE == 3
    finally:
        for name in ("standin", "standin.part"):
            sys.modules.pop(name, None)
