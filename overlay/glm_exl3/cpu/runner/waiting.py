"""Waiting for shared-memory messages without burning a core.

vLLM's reader spins for a second after each message. With as many ranks as cores that takes half of
the time from the ranks, so here it sleeps until the writer's notification; a short limit covers a
notification that was dropped.
"""

from __future__ import annotations

import time
from typing import Any

BUSY_LIMIT_MS = 2


def wait(self: Any, timeout_ms: int | None = None) -> None:
    """`SpinCondition.wait`: return on a notification, on cancellation or after a while."""
    busy = time.monotonic() <= self.last_read + self.busy_loop_s
    limit = timeout_ms
    if busy:
        limit = BUSY_LIMIT_MS if timeout_ms is None else min(BUSY_LIMIT_MS, timeout_ms)
    events = dict(self.poller.poll(timeout=limit))
    if self.local_notify_socket in events and self.read_cancel_socket not in events:
        self.local_notify_socket.recv(copy=False)
