"""A launch of fake ranks with its supervisor as a process, and what a script can do and see.

The supervisor is a fork of the test, so it is on the head's network as the launcher is, and can be
killed like any process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from glm_launch.errors import InterruptedLaunchError, LaunchError
from glm_launch.supervise.desk import Desk, Saved
from glm_launch.supervise.troubles import Rules
from glm_launch.supervise.watchman import Watchman

API = "http://127.0.0.1:8888"
QUICK = {"settle_s": 1.0, "delays_s": (0.5, 1.0, 2.0)}
OURS = ["--filter", "label=io.glm-exl3.project"]


@dataclass
class Scene:
    """`fakes` describes the launch, `limits` the supervisor's rules."""

    fakes: object
    limits: dict[str, object] = field(default_factory=dict)
    pid: int = 0

    def __post_init__(self) -> None:
        self.desk = Desk(self.fakes.folder)

    def watch(self) -> None:
        """Start the supervisor; exit codes: 0 stopped, 5 gave up, 7 refused, 8 by a signal."""
        self.pid = os.fork()
        if self.pid:
            return
        code = 9
        try:
            cluster = self.fakes.cluster
            rules = Rules(**QUICK | self.limits)
            shells = cluster.runner.shells
            code = 0 if Watchman(cluster, self.fakes.secrets, rules, lambda _: shells).run() else 5
        except InterruptedLaunchError:
            code = 8
        except LaunchError as error:
            self.desk.say(f"refused: {error}")
            code = 7
        finally:
            os._exit(code)

    def kill_supervisor(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0

    def end_supervisor(self) -> int:
        """As every command does it: ask until it ends. Its exit code."""
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            os.kill(self.pid, signal.SIGTERM)
            time.sleep(0.2)

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
            assert time.monotonic() - begin < timeout_s, f"waited {timeout_s} s\n{self.said}"
            time.sleep(0.05)
        return time.monotonic() - begin

    def wait_watching(self, other_than: str | None = None, timeout_s: float = 90.0) -> str:
        """The generation that is watched."""

        def watched() -> bool:
            saved = self.desk.saved()
            return (
                saved is not None and saved.phase == "watching" and self.desk.is_held()
                and saved.generation != other_than
            )  # fmt: skip

        self.wait(watched, timeout_s)
        return str(self.saved.generation)

    def wait_said(self, text: str, timeout_s: float = 60.0, after: int = 0) -> float:
        return self.wait(lambda: text in self.said[after:], timeout_s)

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
        if scene.pid:
            scene.end_supervisor()
        cluster.stop()
    assert scene.running() == [0] * len(scene.nodes)
