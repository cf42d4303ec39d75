"""The supervisor's folder in the user's state folder: lock, state, log and metrics.

    FOLDER/supervisor/lock          held (flock) as long as a supervisor lives
    FOLDER/supervisor/state.json    what it does, for `status` and for its successor
    FOLDER/supervisor/log           what it said, one line each, with time
    FOLDER/supervisor/metrics.prom  the same for Prometheus (textfile of node_exporter)

What must stay true: a supervisor may be killed at any moment, and the next one finds here what it
was about to do; nothing here is secret.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glm_launch import procs
from glm_launch.errors import Finding, RefusedError
from glm_launch.files import held, is_held, replace_text
from glm_launch.plan import LaunchPlan
from glm_launch.procs import Identity
from glm_launch.supervise.core import Mind
from glm_launch.supervise.troubles import Trouble

DISMISS_S = 90.0
KILLED_S = 10.0
ASK_S = 2.0
LOG_BYTES = 4 << 20


@dataclass(frozen=True)
class Saved:
    """What a supervisor was doing; times are seconds since 1970."""

    phase: str
    generation: str | None
    plan: LaunchPlan
    identity: Identity
    since: float
    starts: tuple[float, ...] = ()
    restarts_total: int = 0
    trouble: Trouble | None = None
    waits_for: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"plan": self.plan.as_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Saved:
        trouble = Trouble(**value["trouble"]) if value["trouble"] else None
        return cls(**value | {
            "plan": LaunchPlan.from_json(value["plan"]), "identity": Identity(**value["identity"]),
            "trouble": trouble, "starts": tuple(value["starts"]),
            "waits_for": tuple(value["waits_for"]),
        })  # fmt: skip


@dataclass
class Desk:
    """Reads and writes the folder; `state` is the user's state folder."""

    state: Path
    patience_s: float = DISMISS_S
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.state / "supervisor"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be the only supervisor of this folder; raises `RefusedError`."""
        lock = self.folder / "lock"
        with held(lock, asdict(me()), lambda: RefusedError(_supervised(self.saved()))):
            yield

    def is_held(self) -> bool:
        """Whether a supervisor lives."""
        return is_held(self.folder / "lock")

    def dismiss(self) -> bool:
        """End the supervisor, and forget what it was about to do; whether there was one.

        Every command that changes a launch comes through here first. Raises `RefusedError` when
        it does not end.
        """
        held = self.is_held()
        if held:
            self._end_holder()
        (self.folder / "state.json").unlink(missing_ok=True)
        (self.folder / "metrics.prom").unlink(missing_ok=True)
        return held

    def _end_holder(self) -> None:
        """Ask until it ends, since it hears no signal while it stops ranks; then kill it.

        A killed one leaves nothing that the next command does not find.
        """
        begin = time.monotonic()
        while self.is_held():
            waited = time.monotonic() - begin
            if waited > self.patience_s + KILLED_S:
                raise RefusedError(_stays())
            with suppress(OSError, ValueError, TypeError):
                holder = Identity(**json.loads((self.folder / "lock").read_text()))
                if procs.is_alive(holder):
                    late = waited > self.patience_s
                    os.kill(holder.pid, signal.SIGKILL if late else signal.SIGTERM)
            procs.wait_until(lambda: not self.is_held(), ASK_S)

    def saved(self) -> Saved | None:
        try:
            return Saved.from_json(json.loads((self.folder / "state.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, saved: Saved) -> None:
        replace_text(self.folder / "state.json", json.dumps(saved.as_json(), indent=1))
        replace_text(self.folder / "metrics.prom", metrics(saved))

    def say(self, text: str) -> None:
        """One line of the log; a long log loses its older half."""
        with suppress(OSError):
            if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
                self.log.write_bytes(self.log.read_bytes()[-LOG_BYTES // 2 :])
            with self.log.open("a", encoding="utf-8") as stream:
                stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def me() -> Identity:
    identity = procs.identify(os.getpid())
    assert identity is not None
    return identity


def saved_of(mind: Mind, plan: LaunchPlan, restarts_total: int, since: float) -> Saved:
    """What is written of `mind`, whose times are of a clock that starts with the boot."""
    offset = time.time() - mind.at
    return Saved(
        phase=mind.phase, generation=mind.generation, plan=plan, identity=me(), since=since,
        starts=tuple(start + offset for start in mind.starts), restarts_total=restarts_total,
        trouble=mind.trouble, waits_for=mind.waits_for,
    )  # fmt: skip


def metrics(saved: Saved) -> str:
    """The state in Prometheus' text format."""
    return (
        "# TYPE glm_exl3_restarts_total counter\n"
        f"glm_exl3_restarts_total {saved.restarts_total}\n"
        "# TYPE glm_exl3_watching gauge\n"
        f"glm_exl3_watching {int(saved.phase == 'watching')}\n"
    )


def _supervised(saved: Saved | None) -> Finding:
    who = f"process {saved.identity.pid}" if saved else "another process"
    return Finding(
        "supervised",
        f"{who} looks after this launch already",
        "two supervisors would restart the ranks twice",
        "./start.sh status shows what it does; ./start.sh stop ends it",
    )


def _stays() -> Finding:
    return Finding(
        "supervisor-stays",
        "the supervisor could not be ended",
        "it could start the ranks again behind this command",
        "./start.sh status shows its process; its log is in the state folder",
    )
