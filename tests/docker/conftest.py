"""The programs of the image as modules, and nodes of theirs as real processes on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[2] / "docker"
sys.path.insert(0, str(DOCKER))

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); time.sleep(60)"


@dataclass
class Nodes:
    """Starts entry points; everything that is left is killed at the end of the test."""

    folder: Path
    port: int
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __call__(
        self, rank: int, *engine: str, nodes: int = 2, **env: str
    ) -> subprocess.Popen[str]:
        command = engine or (sys.executable, "-c", SLEEPER)
        variables = {
            "PATH": os.environ["PATH"],
            "GLM_EXL3_GENERATION": "g1",
            "GLM_EXL3_NODES": str(nodes),
            "GLM_EXL3_NODE_RANK": str(rank),
            "GLM_EXL3_HEAD": "127.0.0.1",
            "GLM_EXL3_WATCH_PORT": str(self.port),
            "GLM_EXL3_HELLO_TIMEOUT_S": "20",
            "GLM_EXL3_RUN_DIR": str(self.folder / f"run{rank}"),
            "PYTHONPATH": str(self.folder / "packages"),
        }
        process = subprocess.Popen(
            [sys._base_executable, str(DOCKER / "entrypoint.py"), *command],
            env=variables | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def state(self, rank: int) -> dict[str, object]:
        try:
            return json.loads((self.folder / f"run{rank}" / "state.json").read_text())
        except FileNotFoundError:
            return {"phase": "not started"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = Nodes(tmp_path, port)
    yield running
    for process in running.started:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() - begin < timeout_s, "the condition never held"
            time.sleep(0.02)

    return wait
