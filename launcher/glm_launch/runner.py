"""Carries out a plan: the `Runner` protocol, and the one that runs ranks as local processes.

What: start a rank, look at it, stop it, read its log. Why this shape: everything above speaks in
`RankPlan` and `NodeState`, so containers on other machines become another `Runner` and nothing else
changes. What must stay true: `stop` is idempotent and returns only when nothing of the rank is
left; `observe` never changes anything; secrets travel in the environment only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from glm_launch import procs
from glm_launch.plan import RankPlan
from glm_launch.procs import Identity
from glm_launch.settings import Settings

KEEPER_START_S = 10.0
KEEPER_MARGIN_S = 3.0
State = Literal["running", "exited", "orphaned", "lost", "absent"]


@dataclass(frozen=True)
class NodeState:
    """What one rank is doing.

    running: its keeper is there. exited: it ended, `exit_code` says how. orphaned: the keeper was
    killed and processes of the rank are left. lost: all gone without a trace. absent: never
    started.
    """

    rank: int
    role: str
    node: str
    state: State
    pid: int | None = None
    exit_code: int | None = None
    asked: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    log: str = ""


class Runner(Protocol):
    """How ranks are started and looked at; `generation` names one launch."""

    def start(
        self,
        rank: RankPlan,
        generation: str,
        secrets: Mapping[str, str],
        *,
        grace_s: float,
        owned: bool,
    ) -> None:
        """Start one rank; `grace_s` is its time to end, and if `owned` it ends when we do."""

    def observe(self, rank: RankPlan, generation: str) -> NodeState:
        """The state of one rank."""

    def stop(self, rank: RankPlan, generation: str, grace_s: float) -> None:
        """End one rank and wait until nothing of it is left."""

    def log(self, rank: RankPlan, generation: str) -> Path:
        """The file that holds the rank's output; it may not exist yet."""


class LocalRunner:
    """Ranks as processes of this machine, each in a session of its own below a keeper."""

    def __init__(self, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
        self.folder = folder
        self.environ = {k: v for k, v in environ.items() if k not in Settings.model_fields}
        self._lifelines: list[Any] = []

    def log(self, rank: RankPlan, generation: str) -> Path:
        return self.folder / generation / f"{rank.name}.log"

    def record(self, rank: RankPlan, generation: str) -> Path:
        return self.folder / generation / f"{rank.name}.json"

    def start(
        self,
        rank: RankPlan,
        generation: str,
        secrets: Mapping[str, str],
        *,
        grace_s: float,
        owned: bool = False,
    ) -> None:
        record, log = self.record(rank, generation), self.log(rank, generation)
        record.parent.mkdir(parents=True, exist_ok=True)
        env = self.environ | dict(rank.env) | {name: secrets[name] for name in rank.secret_env}
        launcher = str(Path(__file__).resolve().parents[1])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [launcher, env.get("PYTHONPATH", "")]))
        options = ["--owned"] if owned else []
        keeper = subprocess.Popen(
            [sys.executable, "-m", "glm_launch.keeper", str(record), str(log),
             str(grace_s), *options, "--", *rank.argv],
            stdin=subprocess.PIPE if owned else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log.open("ab"),
            env=env,
            start_new_session=True,
            close_fds=True,
        )  # fmt: skip
        self._lifelines.append(keeper)
        procs.wait_until(lambda: record.exists() or keeper.poll() is not None, KEEPER_START_S)

    def observe(self, rank: RankPlan, generation: str) -> NodeState:
        entry = self._entry(rank, generation)
        if entry is None:
            log = str(self.log(rank, generation))
            return NodeState(rank.rank, rank.role, rank.node, "absent", log=log)
        leader = Identity(**entry["leader"])
        return NodeState(
            rank=rank.rank,
            role=rank.role,
            node=rank.node,
            state=_state(entry, leader),
            pid=entry.get("engine_pid", leader.pid),
            exit_code=entry.get("exit_code"),
            asked=bool(entry.get("asked")),
            started_at=entry.get("started_at"),
            ended_at=entry.get("ended_at"),
            log=str(self.log(rank, generation)),
        )

    def stop(self, rank: RankPlan, generation: str, grace_s: float) -> None:
        entry = self._entry(rank, generation)
        if entry is not None:
            procs.end_session(Identity(**entry["leader"]), grace_s + KEEPER_MARGIN_S)
        for keeper in self._lifelines:
            keeper.poll()

    def _entry(self, rank: RankPlan, generation: str) -> dict[str, Any] | None:
        try:
            entry = json.loads(self.record(rank, generation).read_text())
        except (OSError, ValueError):
            return None
        return entry if isinstance(entry, dict) else None


def _state(entry: Mapping[str, Any], leader: Identity) -> State:
    if procs.is_alive(leader):
        return "exited" if "exit_code" in entry else "running"
    if procs.session_members(leader):
        return "orphaned"
    return "exited" if "exit_code" in entry else "lost"
