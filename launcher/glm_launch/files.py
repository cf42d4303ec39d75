"""Files that several processes share: replaced whole, and locks that die with their holder."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

LOOKED_AT_S = 5.0


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
        yield handle


def _taken(handle: TextIO, lock: Path) -> bool:
    """Take it alone; False when another has it. Who only looks shares it for a moment."""
    deadline = time.monotonic() + LOOKED_AT_S
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if is_held(lock) or time.monotonic() >= deadline:
            return False
        time.sleep(0.01)


def is_held(lock: Path) -> bool:
    """Whether a living process holds the lock file; the kernel frees those of dead ones."""
    try:
        with lock.open("r") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
