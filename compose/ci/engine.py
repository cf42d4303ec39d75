"""Process 1 of the engine in compose/ci-gpu.yaml: run the command, and tell the client how it is.

In the folder that both containers see: `alive` names this start and is touched every second,
`ended` appears when the command ended, `log` holds its output. What must stay true: this process
itself ends only when it is stopped, so that compose waits for the client's verdict; killed, it
leaves an `alive` that grows old.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

TOUCH_S = 1.0


def copy(process: subprocess.Popen[bytes], log: Path) -> None:
    """Pass the output on, to docker and to the client."""
    assert process.stdout is not None
    with log.open("wb", buffering=0) as file:
        for line in process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            file.write(line)


def main(command: list[str], folder: Path) -> int:
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    alive, ended = folder / "alive", folder / "ended"
    ended.unlink(missing_ok=True)
    alive.write_text(uuid.uuid4().hex)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    threading.Thread(target=copy, args=(process, folder / "log"), daemon=True).start()
    while not asked.wait(TOUCH_S):
        os.utime(alive)
        if process.poll() is not None and not ended.exists():
            ended.write_text(f"{process.returncode}\n")
    process.terminate()
    process.wait()
    alive.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path("/job")))
