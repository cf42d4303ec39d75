"""Kernels of Triton without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> Callable[..., str]:
    """`interpreted(program, *arguments)`: output of a program beside the test in the interpreter.

    Triton decides when it is imported, so the program is a process of its own.
    """

    def run(program: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(request.path.with_name(program)), *arguments],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
