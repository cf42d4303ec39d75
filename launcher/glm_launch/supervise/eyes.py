"""Looks at everything at once, each in a thread of its own, so that nothing slow hides the rest.

`Eyes` holds the newest look of each kind and makes `Signs` of them. Looking changes nothing. What
must stay true: a look that fails, however, leaves "unknown" and is tried again; what was seen
before it never stands for what is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from glm_launch import health
from glm_launch.errors import LaunchError
from glm_launch.nodes.docker_cli import name_of
from glm_launch.nodes.ssh import LocalShell, Shell, SshShell
from glm_launch.paths import REPOSITORY
from glm_launch.plan import LaunchPlan, RankPlan
from glm_launch.runner import NodeState, Runner
from glm_launch.state import StateStore
from glm_launch.supervise.links import Links, ends_of
from glm_launch.supervise.signs import EngineSign, Outcome, RankSign, Signs

RANK_S = 1.0
COUNTERS_S = 2.0
HEALTH_S = 4.0
HEALTH_OLD_S = 20.0
TIMEOUT_S = 5.0
RUNNING = "vllm:num_requests_running"
STEPS = "vllm:iteration_tokens_total_count"
NO_COUNTERS = EngineSign(0, 0)
CANARY = REPOSITORY / "docker" / "canary.py"
CANARY_OPTIONS: tuple[str, ...] = ()
HEALTH_FILE = "/run/glm-exl3/health.json"


def shells_of(plan: LaunchPlan) -> dict[str, Shell]:
    """How to reach each node of a plan."""
    return {
        rank.node: SshShell(rank.node, rank.ssh) if rank.ssh else LocalShell(rank.node)
        for rank in plan.ranks
    }


def counters(text: str) -> EngineSign | None:
    """The engine's counters out of Prometheus text, summed over engines."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        bare = name.partition("{")[0]
        if bare in (RUNNING, STEPS):
            with suppress(ValueError):
                sums[bare] = sums.get(bare, 0.0) + float(value)
    return EngineSign(sums[RUNNING], sums[STEPS]) if len(sums) == 2 else None


@dataclass(frozen=True)
class Look:
    """One thing to look at every so often; `lose` is called when that failed."""

    what: str
    work: Callable[[], None]
    every_s: float
    lose: Callable[[], None] = lambda: None


@dataclass
class Eyes:
    """Looks at one generation of a plan; `close` ends every thread and process."""

    plan: LaunchPlan
    generation: str
    store: StateStore
    runner: Runner
    shells: Mapping[str, Shell]
    key: str = ""
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = lambda _text: None
    closed: threading.Event = field(default_factory=threading.Event)
    ranks: dict[int, RankSign] = field(default_factory=dict)
    states: dict[int, NodeState] = field(default_factory=dict)
    engine: EngineSign | None = None
    beats: dict[int, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    canary: subprocess.Popen[bytes] | None = None
    canary_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.links = Links(ends_of(self.plan, self.shells))

    def start(self) -> None:
        """Begin to look; returns once every rank was looked at."""
        self.links.start()
        looks: list[Look] = [Look("counters", self._look_at_engine, COUNTERS_S, self._lose_engine)]
        for rank in self.plan.ranks:
            looks += [
                Look(f"rank {rank.rank}", partial(self._look_at_rank, rank), RANK_S,
                     partial(self._lose_rank, rank)),
                Look(f"health of rank {rank.rank}", partial(self._look_at_health, rank), HEALTH_S),
            ]  # fmt: skip
        for look in looks:
            threading.Thread(target=self._repeat, args=(look,), daemon=True).start()
        while len(self.ranks) < len(self.plan.ranks) and not self.closed.is_set():
            time.sleep(0.02)

    def close(self) -> None:
        self.closed.set()
        self.links.close()
        with self.canary_lock:
            if self.canary is not None:
                self.canary.kill()
                self.canary.wait()

    def signs(self, outcome: Outcome | None) -> Signs:
        """Everything known at this moment."""
        current = self.store.current()
        now = self.clock()
        fresh = {n: line for n, (when, line) in self.beats.items() if now - when < HEALTH_OLD_S}
        return Signs(
            at=now,
            generation=current.generation if current else None,
            ranks=tuple(self.ranks[rank.rank] for rank in self.plan.ranks),
            engine=self.engine,
            links=self.links.signs(),
            busy=self.store.is_locked(),
            compiling=any(line.get("compiling") for line in fresh.values()),
            canary_failures=int(fresh.get(0, {}).get("failures") or 0),
            outcome=outcome,
        )

    def _repeat(self, look: Look) -> None:
        failed = ""
        while not self.closed.is_set():
            try:
                look.work()
                failed = ""
            except Exception as error:  # noqa: BLE001 (a thread that ends would blind us)
                look.lose()
                text = f"warning [no-look] {look.what}: {type(error).__name__}: {error}"
                if text != failed:
                    self.say(text)
                failed = text
            self.closed.wait(look.every_s)

    def _lose_engine(self) -> None:
        self.engine = None

    def _lose_rank(self, rank: RankPlan) -> None:
        self.ranks[rank.rank] = RankSign(rank.rank, rank.node, None)

    def _look_at_rank(self, rank: RankPlan) -> None:
        state = self.runner.observe(rank, self.generation)
        self.states[rank.rank] = state
        alive: bool | None = state.state == "running"
        if state.state == "lost" and self.plan.runtime != "local":
            alive = None
        self.ranks[rank.rank] = RankSign(rank.rank, rank.node, alive, "" if alive else said(state))

    def _look_at_engine(self) -> None:
        import httpx

        try:
            reply = httpx.get(f"{self.plan.base_url}/metrics", timeout=TIMEOUT_S)
            answered = reply.status_code == 200
            self.engine = (counters(reply.text) or NO_COUNTERS) if answered else None
        except httpx.HTTPError:
            self.engine = None

    def _look_at_health(self, rank: RankPlan) -> None:
        text = self._health_of(rank)
        if not text:
            return
        with suppress(ValueError):
            line = json.loads(text)
            before = self.beats.get(rank.rank)
            if line["generation"] == self.generation and (
                before is None or before[1]["beat"] != line["beat"]
            ):
                self.beats[rank.rank] = (self.clock(), line)

    def _health_of(self, rank: RankPlan) -> str:
        if self.plan.runtime == "local":
            return self._local_health(rank)
        script = f"read -r line < {HEALTH_FILE} && printf '%s\\n' \"$line\""
        command = ["docker", "exec", name_of(rank.rank), "sh", "-c", script]
        done = self.shells[rank.node].run(command, timeout_s=TIMEOUT_S)
        return done.out if done.ok else ""

    def _local_health(self, rank: RankPlan) -> str:
        """Local ranks have no process 1 that sends canaries, so a child of ours does."""
        if rank.rank:
            return ""
        file = self.store.launches / self.generation / "health.json"
        with self.canary_lock:
            gone = self.canary is None or self.canary.poll() is not None
            roots = self._pids()
            if gone and roots and not self.closed.is_set():
                self.canary = _canary(self.plan, self.generation, file, self.key, roots)
        return _text(file)

    def _pids(self) -> list[int]:
        """The processes below which compilers count; empty before every rank was seen.

        Others compile on this machine, too, and must not postpone anything.
        """
        pids = [state.pid for state in self.states.values() if state.pid]
        return pids if len(pids) == len(self.plan.ranks) else []


def said(state: NodeState) -> str:
    """How a rank ended, in words."""
    try:
        health.raise_if_ended([state])
    except LaunchError as error:
        return error.findings[0].seen
    return ""


def _canary(
    plan: LaunchPlan, generation: str, file: Path, key: str, roots: Sequence[int]
) -> subprocess.Popen[bytes]:
    argv = [sys.executable, str(CANARY), str(file), "--generation", generation, *CANARY_OPTIONS]
    argv += ["--url", plan.base_url, "--model", plan.served_name, "--root", *map(str, roots)]
    argv += ["--parent", str(os.getpid())]
    env = {"PATH": "/usr/bin:/bin"} | ({"VLLM_API_KEY": key} if key else {})
    return subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
