"""Runs one rank and keeps its books.

    python -m glm_launch.keeper RECORD LOG GRACE_S [--owned] -- ENGINE ARGUMENTS

What: the parent of one engine process. It opens no session itself (the runner does), writes who it
is to RECORD before the engine starts, sends the engine's output to LOG, passes SIGTERM on, and when
the engine ends for any reason kills what the engine left behind and notes the exit code. With
`--owned`, standard input is a pipe from the launcher; when that closes, the rank is stopped.

Why this shape: after `start` the launcher is gone, so somebody must wait for the engine, or its
exit code is lost; and an engine that died exits 0, so any end that nobody asked for becomes 70.

What must stay true: RECORD exists before the engine does, so a launcher killed at any moment leaves
no process that the next command cannot find. Standard library only: it costs 10 MB per rank.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from glm_launch import procs

EXIT_UNASKED = 70
EXIT_NOT_STARTED = 71
LOOK_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36


class Keeper:
    """The books of one rank."""

    def __init__(self, record: Path, grace_s: float) -> None:
        self.record = record
        self.grace_s = grace_s
        self.asked = False
        identity = procs.identify(os.getpid())
        assert identity is not None
        self.me = identity
        self.entry: dict[str, object] = {"leader": asdict(identity), "started_at": time.time()}

    def write(self, **entries: object) -> None:
        self.entry |= entries
        draft = self.record.with_suffix(".tmp")
        draft.write_text(json.dumps(self.entry))
        draft.replace(self.record)

    def stop_requested(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True

    def run(self, argv: list[str], log: Path, *, owned: bool) -> int:
        """Start the engine, wait for its end, clean up behind it; the keeper's exit code."""
        self.write()
        wakeup = self.listen()
        with log.open("ab") as output:
            try:
                engine = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            except OSError as error:
                output.write(f"{argv[0]}: {error.strerror}\n".encode())
                self.write(exit_code=EXIT_NOT_STARTED, ended_at=time.time(), asked=self.asked)
                return EXIT_NOT_STARTED
        self.write(engine_pid=engine.pid)
        code = self.wait(engine.pid, [wakeup, 0] if owned else [wakeup])
        engine.returncode = code
        self.sweep()
        self.write(exit_code=code, ended_at=time.time(), asked=self.asked)
        return 0 if self.asked else EXIT_UNASKED

    def listen(self) -> int:
        """Adopt orphans and turn signals into bytes on a pipe; the pipe's reading end."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.stop_requested)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return reading

    def wait(self, engine: int, descriptors: list[int]) -> int:
        """Wait for the engine's end; once asked to stop, allow it `grace_s`, then kill it."""
        deadline: float | None = None
        while (code := reap(engine)) is None:
            if self.asked and deadline is None:
                deadline = time.monotonic() + self.grace_s
                procs.send([engine], signal.SIGTERM)
            if deadline is not None and time.monotonic() >= deadline:
                procs.send([engine], signal.SIGKILL)
            ready, _, _ = select.select(descriptors, [], [], LOOK_S)
            for descriptor in ready:
                if os.read(descriptor, 512) == b"":
                    descriptors.remove(descriptor)
                    self.asked = True
        return code

    def sweep(self) -> None:
        """Kill what the engine left in this session or as an orphan of this process."""
        while left := {*procs.session_members(self.me), *procs.children(self.me.pid)} - {
            self.me.pid
        }:
            procs.send(left, signal.SIGKILL)
            time.sleep(procs.POLL_S)
            reap(0)


def reap(engine: int) -> int | None:
    """Collect children that ended; the exit code of `engine` when it was among them."""
    code = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == engine:
                code = os.waitstatus_to_exitcode(status)
    return code


def main(arguments: list[str]) -> int:
    """Parse the few arguments; they come from the runner, not from a person."""
    split = arguments.index("--")
    record, log, grace_s = arguments[:3]
    keeper = Keeper(Path(record), float(grace_s))
    return keeper.run(arguments[split + 1 :], Path(log), owned="--owned" in arguments[:split])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
