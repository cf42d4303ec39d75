"""Files that survive a kill or a power cut: complete under their name, or not there."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Force the bytes of a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """`write` a draft, then give it its name: a reader, or a machine that lost power, has the old
    file or the new one."""
    draft = path.with_name(f"{path.name}.tmp")
    write(draft)
    sync(draft)
    draft.replace(path)
    sync(path.parent)


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def alone(lock: Path, refusal: Callable[[], Exception]) -> Iterator[None]:
    """Hold the lock file while the block runs; raises `refusal()` when another process has it."""
    with lock.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal() from None
        yield
