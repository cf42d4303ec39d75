"""A worker listens for the head: no sign of life for SILENCE_S, and its rank ends.

Nobody else cleans up behind a head that lost its power: a headless node of vLLM stays and holds its
memory. The head's process 1 sends `alive` every two seconds over the connection of the hello. What
must stay true: `run` returns a reason exactly when the head is silent for too long, hung up, or is
of another generation; `close` ends it from any thread.
"""

from __future__ import annotations

import json
import select
import socket
import time
from dataclasses import dataclass, field
from threading import Event

SILENCE_S = 10.0
HUNG_UP_S = 3.0
LOOK_S = 0.5
MAX_BYTES = 1 << 16


@dataclass
class HeadWatch:
    """`hung_up_s`: how long a stop by the launcher may still come after the head hung up."""

    connection: socket.socket
    generation: str
    silence_s: float = SILENCE_S
    hung_up_s: float = HUNG_UP_S
    closed: Event = field(default_factory=Event)
    _buffer: bytes = b""

    def run(self) -> str | None:
        """Why the rank must end; None after `close`."""
        heard = time.monotonic()
        while not self.closed.is_set():
            ready, _, _ = select.select([self.connection], [], [], LOOK_S)
            data = self._receive() if ready else None
            if data == b"":
                if self.closed.wait(self.hung_up_s):
                    break
                return "the head hung up"
            if data:
                heard = time.monotonic()
                other = self._other_generation(data)
                if other is not None:
                    return f"the head runs generation {other}, this node {self.generation}"
            elif time.monotonic() - heard >= self.silence_s:
                return f"no sign of life from the head for {self.silence_s:g} s"
        return None

    def close(self) -> None:
        self.closed.set()

    def _receive(self) -> bytes:
        try:
            return self.connection.recv(MAX_BYTES)
        except OSError:
            return b""

    def _other_generation(self, data: bytes) -> str | None:
        """The generation of a message that is not ours; what is no message says nothing."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._buffer = self._buffer[-MAX_BYTES:]
        for line in lines:
            try:
                told = str(json.loads(line)["generation"])
            except (ValueError, KeyError, TypeError):
                continue
            if told != self.generation:
                return told
        return None
