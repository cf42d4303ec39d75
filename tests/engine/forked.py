"""Programs of this folder in processes of their own, forked from one that has imported vLLM.

The import costs more processor time than most of the runs behind it. A forked process shares
nothing with the others but modules: environment, engine and exit status are its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["vllm.entrypoints.llm"])


def _program(argv: Sequence[str], env: Mapping[str, str], log: str) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")


def run(argv: Sequence[str], env: Mapping[str, str], log: Path, timeout_s: float) -> int:
    """Exit status of the Python file `argv[0]`, run as a program, its output in `log`.

    `env` comes on top of what importing vLLM set. Ends the program's whole session. Negative: the
    signal that ended it; raises TimeoutError.
    """
    process = FORKS.Process(target=_program, args=(tuple(argv), dict(env), str(log)))
    process.start()
    try:
        process.join(timeout_s)
        if process.exitcode is None:
            tail = log.read_text(errors="replace")[-6000:] if log.exists() else ""
            raise TimeoutError(f"{argv} did not end within {timeout_s:g} s:\n{tail}")
        return process.exitcode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
