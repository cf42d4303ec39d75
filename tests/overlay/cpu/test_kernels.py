"""Our functions give what vLLM's own kernels give on the same inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "interpreted.py"


@pytest.mark.slow
def test_every_case_agrees_with_the_interpreted_kernel(tmp_path):
    result = tmp_path / "result.json"
    subprocess.run([sys.executable, str(PROGRAM), str(result)], check=True, timeout=300)
    outcomes = json.loads(result.read_text())
    assert len(outcomes) >= 26
    assert {name: outcome for name, outcome in outcomes.items() if outcome != "same"} == {}
