"""A checkpoint that passes the checks, a runner without processes, and commands of the launcher."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from glm_launch import procs
from glm_launch.plan import LaunchPlan, RankPlan
from glm_launch.runner import NodeState

ROOT = Path(__file__).parents[2]
FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with one small tensor and a configuration."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Small"]}))
    header = json.dumps({"x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    payload = struct.pack("<Q", len(header)) + header + bytes(8)
    (folder / "model.safetensors").write_bytes(payload)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class FakeRunner:
    """A `Runner` that remembers what was asked; `states` says what `observe` shows."""

    folder: Path
    states: dict[int, str] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    fail_at: int | None = None

    def start(self, rank: RankPlan, generation: str, secrets: Mapping, **_: object) -> None:
        self.calls.append(("start", rank.rank))
        if rank.rank == self.fail_at:
            raise OSError("no such program")
        self.states.setdefault(rank.rank, "running")

    def observe(self, rank: RankPlan, generation: str) -> NodeState:
        state = self.states.get(rank.rank, "absent")
        log = str(self.log(rank, generation))
        return NodeState(rank.rank, rank.role, rank.node, state, log=log)

    def stop(self, rank: RankPlan, generation: str, grace_s: float) -> None:
        self.calls.append(("stop", rank.rank))
        self.states[rank.rank] = "absent"

    def log(self, rank: RankPlan, generation: str) -> Path:
        return self.folder / f"{rank.name}.log"


@pytest.fixture
def fake_runner(tmp_path: Path) -> FakeRunner:
    return FakeRunner(tmp_path)


def two_ranks(**changes: object) -> LaunchPlan:
    """A plan of a head and a worker on ports that are free."""
    ranks = tuple(
        RankPlan(number, role, "127.0.0.1", ("true",), ())
        for number, role in enumerate(("head", "worker"))
    )
    port = free_port()
    values = {
        "runtime": "local", "model": "m", "served_name": "name", "drafting": "none",
        "base_url": f"http://127.0.0.1:{port}", "api_host": "127.0.0.1", "port": port,
        "master_addr": "127.0.0.1", "master_port": free_port(), "ranks": ranks,
        "start_order": (1, 0), "ready_timeout_s": 5, "stop_grace_s": 5,
    }  # fmt: skip
    return LaunchPlan(**(values | changes))


@pytest.fixture
def plan() -> LaunchPlan:
    return two_ranks()


@dataclass
class Launcher:
    """Runs the command line in processes of its own, with a state folder of its own."""

    env: dict[str, str]

    def __call__(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "glm_launch", *arguments],
            env=self.env | env, capture_output=True, text=True, timeout=60, cwd=ROOT,
        )  # fmt: skip

    def popen(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self.env | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=ROOT, start_new_session=True,
        )  # fmt: skip

    @property
    def state(self) -> Path:
        return Path(self.env["GLM_STATE_DIR"])

    def leaders(self) -> list[procs.Identity]:
        """The keepers of all launches."""
        records = self.state.glob("launches/*/rank*.json")
        return [procs.Identity(**json.loads(path.read_text())["leader"]) for path in records]

    def left_over(self) -> list[int]:
        return [pid for leader in self.leaders() for pid in procs.session_members(leader)]


def engine_command(trouble: str = ":") -> str:
    return f"{sys.executable} {FAKE_ENGINE} --trouble {trouble}"


@pytest.fixture
def launcher(tmp_path: Path, checkpoint: Path) -> Iterator[Launcher]:
    packages = (str(ROOT / name) for name in ("launcher", "bench", "overlay"))
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(packages),
        "GLM_STATE_DIR": str(tmp_path / "state"),
        "GLM_ENV_FILE": str(tmp_path / "env"),
        "MODEL": str(checkpoint),
        "SPEC_METHOD": "none",
        "PORT": str(free_port()),
        "MASTER_PORT": str(free_port()),
        "READY_TIMEOUT_S": "20",
        "STOP_GRACE_S": "2",
        "SUPERVISE": "0",
        "ENGINE_COMMAND": engine_command(),
    }  # fmt: skip
    launcher = Launcher(env)
    yield launcher
    for leader in launcher.leaders():
        procs.end_session(leader, 0.5)


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    """Poll with a deadline; fails the test when the condition never holds."""

    def wait(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() - begin < timeout_s, "the condition never held"
            time.sleep(0.02)

    return wait
