"""Logits of the served packed checkpoint against transformers on the dequantised weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import START_TIMEOUT_S, make_checkpoint

pytestmark = pytest.mark.engine

LENGTHS = (5, 40, 200, 600)


@pytest.mark.parametrize("family", ["tr3", "full"])
def test_logits_equal_transformers_on_the_dequantised_weights(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    twin = checkpoints[family].parent / f"{family}-twin"
    make_checkpoint("bf16", twin, "--twin-of", family)
    job = {"reference": str(twin), "served": str(checkpoints[family]), "lengths": LENGTHS}
    job_path, result_path = tmp_path / "job.json", tmp_path / "result.json"
    job_path.write_text(json.dumps(job))
    script = Path(__file__).parent / "parity.py"
    done = subprocess.run(
        [sys.executable, str(script), str(job_path), str(result_path)],
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    result = json.loads(result_path.read_text())
    assert not result["failures"], result
    assert result["clamped"], "no activation reached the clamp, so the clamp was not compared"
    assert [row["prompt"] for row in result["rows"]] == list(LENGTHS)
