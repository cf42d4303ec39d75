"""A launch of two fake ranks on this machine with its supervisor as a process."""

from __future__ import annotations

import contextlib
import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from glm_launch.state import StateStore
from glm_launch.supervise.desk import Desk

HERE = Path(__file__).parent
RANK = HERE.parents[1] / "lab" / "fakerank.py"
QUICK = {"stall_s": 4.0, "settle_s": 0.5, "delays_s": [0.2, 0.4, 0.6]}


@dataclass
class Service:
    """A launch of two fake ranks and what looks after it."""

    launcher: object
    supervisors: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = StateStore(self.launcher.state)
        self.desk = Desk(self.launcher.state)

    def start(self) -> str:
        done = self.launcher("start")
        assert done.returncode == 0, done.stderr
        return self.generation

    @property
    def generation(self) -> str | None:
        current = self.store.current()
        return current.generation if current and current.phase == "ready" else None

    def supervise(self, *more: str, **limits: object) -> subprocess.Popen[str]:
        arguments = [str(HERE / "drive.py"), json.dumps(QUICK | limits), *more]
        process = self.launcher.popen(*arguments)
        self.supervisors.append(process)
        return process

    def watching(self) -> bool:
        """Whether the newest supervisor watches; what an older one left says nothing."""
        saved = self.desk.saved()
        mine = saved is not None and saved.identity.pid == self.supervisors[-1].pid
        return mine and saved.phase == "watching" and self.desk.is_held()

    def pids(self) -> list[int]:
        """Engine processes, the head's first."""
        records = sorted((self.store.launches / self.generation).glob("rank*.json"))
        return [json.loads(path.read_text())["engine_pid"] for path in records]

    def post(self, path: str, body: dict, timeout: float = 10.0) -> httpx.Response:
        url = f"http://127.0.0.1:{self.launcher.env['PORT']}{path}"
        return httpx.post(url, json=body, timeout=timeout)


def canaries(state: Path) -> list[str]:
    """Processes that still ask an engine of this state folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().decode(errors="replace")
            if "canary.py" in command and f"{state}/" in command:
                found.append(path.parent.name)
    return found


def restarted(service: Service, before: str):
    return lambda: service.generation not in (None, before) and service.watching()
