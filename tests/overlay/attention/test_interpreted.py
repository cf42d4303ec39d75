"""The Triton kernels under the interpreter, each program in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "checks"), [("interpreted_attention", 5), ("interpreted_indexer", 6)]
)
def test_every_check_passes(program: str, checks: int, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(HERE / f"{program}.py"), str(result)]
    subprocess.run(command, check=True, timeout=500)
    outcomes = json.loads(result.read_text())
    assert len(outcomes) == checks
    failed = {name: text for name, text in outcomes.items() if text != "passed"}
    assert not failed, "\n".join(failed.values())
