"""Files that several processes share: replaced whole, and locks that die with their holder."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from glm_launch import procs

LOOKED_AT_S = 5.0
LEFT_S = 10.0
POLL_S = 0.01


def replace_text(path: Path, text: str) -> None:
    """Write `path` so that a reader sees the old text or the new one, never a part."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(text)
    draft.replace(path)


@contextmanager
def held(lock: Path, holder: object, refusal: Callable[[], Exception]) -> Iterator[TextIO]:
    """Hold the lock file with `holder` in it as JSON; raises `refusal()` when another has it."""
    lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with lock.open("a+") as handle:
        if not _taken(handle, lock):
            raise refusal()
        handle.truncate(0)
        handle.write(json.dumps(holder))
        handle.flush()
        try:
            yield handle
        finally:
            # Closing is not enough: a child that is about to become another program has it open.
            fcntl.flock(handle, fcntl.LOCK_UN)


def _taken(handle: TextIO, lock: Path) -> bool:
    """Take it alone; False when another has it. Who only looks shares it for a moment."""
    deadline = time.monotonic() + LEFT_S + LOOKED_AT_S
    while not _locks(handle, fcntl.LOCK_EX):
        if is_held(lock) or time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def is_held(lock: Path) -> bool:
    """Whether somebody holds the lock file; the kernel frees those of dead processes.

    It does so late when a killed holder was starting a program: until that runs it is a copy of
    its parent, lock included. So a lock whose holder is dead is looked at again, up to `LEFT_S`.
    """
    deadline = time.monotonic() + LEFT_S
    while True:
        try:
            with lock.open("r") as handle:
                if _locks(handle, fcntl.LOCK_SH):
                    return False
                if _lives(handle.read()) or time.monotonic() >= deadline:
                    return True
        except FileNotFoundError:
            return False
        time.sleep(POLL_S)


def _locks(handle: TextIO, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lives(holder: str) -> bool:
    """Whether the process that `held` wrote down runs; False for what names none."""
    try:
        told = json.loads(holder)
        now = procs.identify(int(told["pid"]))
    except (ValueError, KeyError, TypeError):
        return False
    return now is not None and told.get("start_ticks", now.start_ticks) == now.start_ticks
