"""Linux processes as facts: identity that survives pid reuse, and who belongs to a session.

A pid alone can be reused; pid, start time and boot together cannot. Every rank is the leader of a
session of its own, and the kernel does not give out a number that is still some process's session,
so "all processes of session S" finds what a rank left behind even when its leader is gone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
POLL_S = 0.05


@dataclass(frozen=True)
class Identity:
    """A process for good: its pid, start time in clock ticks since boot, and the boot."""

    pid: int
    start_ticks: int
    boot: str


@dataclass(frozen=True)
class _Stat:
    pid: int
    state: str
    parent: int
    session: int
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return _Stat(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def _all_stats() -> Iterable[_Stat]:
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
            yield stat


def boot_id() -> str:
    """The kernel's id of this boot."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Identity | None:
    """The identity of a running process; None when there is none (a zombie counts as gone)."""
    stat = _stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    return Identity(pid, stat.start_ticks, boot_id())


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process still runs."""
    return identify(identity.pid) == identity


def session_members(leader: Identity) -> list[int]:
    """Pids of the session that `leader` opened, itself included; empty when all are gone."""
    if leader.boot != boot_id():
        return []
    current = _stat(leader.pid)
    if current is not None and current.start_ticks != leader.start_ticks:
        return []
    return [
        stat.pid for stat in _all_stats() if stat.session == leader.pid and stat.state not in "ZX"
    ]


def children(parent: int) -> list[int]:
    """Pids of the running children of `parent`."""
    return [stat.pid for stat in _all_stats() if stat.parent == parent and stat.state not in "ZX"]


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each pid; those that are gone do not matter."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until `condition` holds; False when `timeout_s` passed first."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def end_session(leader: Identity, grace_s: float) -> None:
    """Ask the leader to end, wait `grace_s`, then kill whatever is left of its session."""
    if is_alive(leader):
        send([leader.pid], signal.SIGTERM)
        wait_until(lambda: not session_members(leader), grace_s)
    while members := session_members(leader):
        send(members, signal.SIGKILL)
        wait_until(lambda: not session_members(leader), 1.0)
