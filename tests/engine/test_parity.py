"""Logits of the served packed checkpoint against transformers on the dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import make_checkpoint, perform

pytestmark = pytest.mark.engine

LENGTHS = (5, 40, 200, 600)


@pytest.mark.parametrize("family", [pytest.param("tr3", marks=pytest.mark.long), "full"])
def test_logits_equal_transformers_on_the_dequantised_weights(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    twin = checkpoints[family].parent / f"{family}-twin"
    make_checkpoint("bf16", twin, "--twin-of", family)
    job = {"reference": str(twin), "served": str(checkpoints[family]), "lengths": LENGTHS}
    result = json.loads(perform("parity.py", job, tmp_path).read_text())
    assert not result["failures"], result
    assert result["clamped"], "no activation reached the clamp, so the clamp was not compared"
    assert [row["prompt"] for row in result["rows"]] == list(LENGTHS)
