"""A program forked from the process that imported vLLM behaves as one of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import forked

pytestmark = pytest.mark.engine


def program(folder: Path, text: str) -> tuple[str, ...]:
    path = folder / "program.py"
    path.write_text(text)
    return (str(path), "argument")


@pytest.mark.parametrize(
    ("text", "status", "output"),
    [
        ("import os, sys; print(sys.argv[1], os.environ['WORD'], __name__)", 0,
         "argument word __main__"),
        ("import sys; assert 'vllm.entrypoints.llm' in sys.modules; print('there')", 0, "there"),
        ("import sys; sys.exit(6)", 6, ""),
        ("raise ValueError('planted')", 1, "ValueError: planted"),
        ("import os; print('so far', flush=True); os.kill(os.getpid(), 9)", -9, "so far"),
    ],
)  # fmt: skip
def test_status_and_output(tmp_path, text, status, output) -> None:
    log = tmp_path / "log"
    env = {**os.environ, "WORD": "word"}
    assert forked.run(program(tmp_path, text), env, log, 60) == status
    assert output in log.read_text()


def test_a_program_that_does_not_end_is_ended_with_its_children(tmp_path) -> None:
    text = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "print('here', flush=True); time.sleep(600)\n"
    )
    argv = program(tmp_path, "")
    forked.run(argv, os.environ, tmp_path / "log", 60)
    program(tmp_path, text)
    with pytest.raises(TimeoutError, match="here"):
        forked.run(argv, os.environ, tmp_path / "log", 5)
    child = Path("/proc", (tmp_path / "pid").read_text())
    until = time.monotonic() + 5
    while child.exists() and "Z" not in (child / "stat").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
