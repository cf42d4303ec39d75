"""Ctrl-C, SIGTERM and SIGHUP as one exception, and a shield for the part that must not be cut.

What must stay true: during a rollback or a stop a second signal is ignored, since half a rollback
is what leaves processes behind.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from glm_launch.errors import InterruptedLaunchError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise InterruptedLaunchError(signal.Signals(number).name)


@contextmanager
def as_exceptions() -> Iterator[None]:
    """Inside, each of the three signals raises `InterruptedLaunchError`."""
    before = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def shielded() -> Iterator[None]:
    """Inside, the three signals are ignored."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
