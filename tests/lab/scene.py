"""A launch of fake ranks with its supervisor as a process, and what a script can do and see.

The supervisor is a process of its own (`supervised.py`) on the head's network, as the launcher is.
It must not be a fork of the test, whose other threads may hold locks of the C library just then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from lab import HERE, ROOT

from glm_launch.supervise.desk import Desk, Saved

API = "http://127.0.0.1:8888"
QUICK = {"settle_s": 1.0, "delays_s": (0.5, 1.0, 2.0)}
SUPERVISED = str(HERE / "supervised.py")
OURS = ["--filter", "label=io.glm-exl3.project"]


@dataclass
class Scene:
    """`fakes` describes the launch, `limits` the supervisor's rules."""

    fakes: object
    limits: dict[str, object] = field(default_factory=dict)
    supervisor: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.desk = Desk(self.fakes.folder)

    def watch(self) -> None:
        """Start the supervisor; `supervised.py` has its exit codes."""
        request = {"fakes": self.fakes.as_json(), "limits": QUICK | self.limits}
        packages = os.pathsep.join(str(ROOT / name) for name in ("launcher", "overlay"))
        self.supervisor = subprocess.Popen(
            [sys.executable, SUPERVISED], stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": packages},
        )  # fmt: skip
        assert self.supervisor.stdin is not None
        self.supervisor.stdin.write(json.dumps(request).encode())
        self.supervisor.stdin.close()

    def kill_supervisor(self) -> None:
        assert self.supervisor is not None
        self.supervisor.kill()
        self.supervisor.wait()

    def end_supervisor(self) -> int:
        """As every command does it: ask until it ends. Its exit code."""
        assert self.supervisor is not None
        while self.supervisor.poll() is None:
            self.supervisor.terminate()
            time.sleep(0.2)
        return self.supervisor.returncode

    @property
    def watched(self) -> str | None:
        """The generation that this scene's own supervisor watches."""
        saved, supervisor = self.desk.saved(), self.supervisor
        alive = supervisor is not None and supervisor.poll() is None
        if saved is None or saved.phase != "watching" or not alive:
            return None
        return saved.generation if saved.identity.pid == supervisor.pid else None

    @property
    def nodes(self):
        return self.fakes.nodes

    @property
    def saved(self) -> Saved:
        saved = self.desk.saved()
        assert saved is not None
        return saved

    @property
    def said(self) -> str:
        return self.desk.log.read_text() if self.desk.log.exists() else ""

    def wait(self, what: Callable[[], bool], timeout_s: float = 60.0) -> float:
        """Seconds until it was so."""
        begin = time.monotonic()
        while not what():
            assert time.monotonic() - begin < timeout_s, f"waited {timeout_s} s\n{self.evidence()}"
            time.sleep(0.05)
        return time.monotonic() - begin

    def wait_watching(self, other_than: str | None = None, timeout_s: float = 90.0) -> str:
        """The generation that is watched."""

        self.wait(lambda: self.watched not in (None, other_than), timeout_s)
        return str(self.saved.generation)

    def wait_said(self, text: str, timeout_s: float = 60.0, after: int = 0) -> float:
        return self.wait(lambda: text in self.said[after:], timeout_s)

    def evidence(self) -> str:
        """What supervisor and ranks said and how they are, for whoever reads of a failure."""
        ended = self.supervisor.poll() if self.supervisor else "never started"
        parts = [f"supervisor: exit code {ended}, saved {self.desk.saved()}\n{self.said}"]
        for number, node in enumerate(self.nodes):
            name = f"glm-exl3-node{number}"
            for command in (["ps", "-a"], ["inspect", "--format", "{{json .State}}", name],
                            ["logs", "--timestamps", "--tail", "60", name]):  # fmt: skip
                done = node.shell.run(["docker", *command])
                parts.append(f"{node.name}: docker {command[0]}\n{done.out}{done.err}")
        return "\n".join(parts)

    def docker(self, number: int, *command: str) -> str:
        done = self.nodes[number].shell.run(["docker", *command])
        assert done.ok, done.err
        return done.out

    def ask(self, timeout_s: float = 10.0) -> int:
        body = {"model": "fake", "prompt": "x", "max_tokens": 2}
        headers = {"Authorization": f"Bearer {self.fakes.key}"} if self.fakes.key else {}
        url = f"{API}/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=timeout_s).status_code

    def trouble(self, what: str) -> None:
        httpx.post(f"{API}/fake", json={"do": what}, timeout=5)

    def running(self) -> list[int]:
        """Running containers of ours on each node that answers."""
        return [len(self.docker(n, "ps", "-q", *OURS).split()) for n in range(len(self.nodes))]

    def generations(self) -> list[set[str]]:
        """Generations of the running containers of each node."""
        label = '{{.Label "io.glm-exl3.generation"}}'
        numbers = range(len(self.nodes))
        return [set(self.docker(n, "ps", *OURS, "--format", label).split()) for n in numbers]


@contextmanager
def playing(fakes: object, **limits: object) -> Iterator[Scene]:
    """Launched and watched inside; afterwards everything is stopped, and nothing is left."""
    cluster = fakes.launch()
    scene = Scene(fakes, limits)
    scene.watch()
    try:
        scene.wait_watching()
        yield scene
    finally:
        scene.end_supervisor()
        cluster.stop()
    assert scene.running() == [0] * len(scene.nodes)
