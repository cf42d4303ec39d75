"""The client of compose/ci-gpu.yaml: wait for a real answer, then measure; standard library only.

Exit codes: that of the measurement, 4 when no answer came in time, 5 when a canary was not
answered, before or after the measurement, 7 when the engine ended, 143 when this was stopped.
GLM_API is the engine's address, GLM_READY_TIMEOUT_S the patience, GLM_BENCH_COMMAND what to run
instead of a short decode measurement, GLM_JOB_DIR where ci/engine.py tells how the engine is.

What must stay true: 0 only if one and the same start of the engine answered, was measured by a
command that ended with 0, and answered again.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S = 1.0
ANSWER_S = 300.0
BEGIN_S = 60.0
OLD_S = 20.0
TAIL_LINES = 60
NOT_READY, REFUSED, ENDED, STOPPED = 4, 5, 7, 143
STOPS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class Engine:
    """What ci/engine.py tells in `folder`; `start` names the start that was seen first."""

    folder: Path
    began: float
    start: str = ""

    def trouble(self) -> str:
        """Why the engine is not the one that was started; empty while it is."""
        try:
            age_s = time.time() - (self.folder / "alive").stat().st_mtime
            start = (self.folder / "alive").read_text()
        except OSError:
            age_s, start = float("inf"), ""
        if not self.start:
            if age_s > OLD_S:
                late = time.monotonic() - self.began > BEGIN_S
                return f"the engine's container does not run after {BEGIN_S:g} s" if late else ""
            self.start = start
        if start not in ("", self.start):
            return "the engine's container was started again"
        if age_s > OLD_S or not start:
            return f"the engine's container gave no sign of life for {OLD_S:g} s or ended"
        with suppress(OSError):
            return f"the engine ended with {(self.folder / 'ended').read_text().strip()}"
        return ""

    def tail(self) -> str:
        """The last lines of its log."""
        with suppress(OSError):
            lines = (self.folder / "log").read_text(errors="replace").splitlines()
            return "\n".join(lines[-TAIL_LINES:])
        return ""


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of a reply; raises `urllib.error.URLError`."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    key = os.environ.get("VLLM_API_KEY")
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, data, headers)  # noqa: S310 (an address of this job)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:  # noqa: S310
        return json.load(reply)


def wait_for_model(api: str, timeout_s: float, engine: Engine) -> str | None:
    """The name of the served model, or None when the API did not come up in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not engine.trouble():
        with suppress(OSError, ValueError, LookupError):
            return str(ask(f"{api}/v1/models")["data"][0]["id"])
        time.sleep(POLL_S)
    return None


def canary(api: str, model: str) -> str:
    """The text of a short completion; raises OSError, ValueError or LookupError."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    return str(ask(f"{api}/v1/completions", body)["choices"][0]["text"])


@contextmanager
def stops_held_back(held: list[int]) -> Iterator[None]:
    """Collect signals in `held`: one that raised inside Popen would leave a child without owner."""
    before = {number: signal.signal(number, lambda n, _: held.append(n)) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def measure(command: list[str], engine: Engine) -> int:
    """The exit code of the measurement, which ends early when the engine does."""
    held: list[int] = []
    with stops_held_back(held):
        process = subprocess.Popen(command)
    try:
        for number in held:
            signal.raise_signal(number)
        while process.poll() is None:
            if engine.trouble():
                return ENDED
            time.sleep(POLL_S)
    finally:
        process.kill()
        process.wait()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def work(api: str, limit_s: float, engine: Engine) -> int:
    """The exit code of the job."""
    model = wait_for_model(api, limit_s, engine)
    if model is None:
        say(f"no answer from {api} within {limit_s:g} s" if not engine.trouble() else "not READY")
        return NOT_READY
    command = shlex.split(os.environ.get("GLM_BENCH_COMMAND", "")) or [
        sys.executable, "-m", "glm_bench.cli", "decode", "--url", f"{api}/v1", "--runs", "2",
        "--max-tokens", "64", "--json",
    ]  # fmt: skip
    try:
        say(f"canary: {canary(api, model)!r}")
        code = measure(command, engine)
        say(f"the measurement exited with {code}")
        say(f"after the measurement: {canary(api, model)!r}")
    except (OSError, ValueError, LookupError) as error:
        say(f"the canary failed: {type(error).__name__}: {error}")
        return REFUSED
    return code


def main() -> int:
    for number in STOPS:
        signal.signal(number, lambda *_: sys.exit(STOPPED))
    engine = Engine(Path(os.environ.get("GLM_JOB_DIR") or "/job"), time.monotonic())
    api = os.environ.get("GLM_API", "http://127.0.0.1:8000")
    code = work(api, float(os.environ.get("GLM_READY_TIMEOUT_S") or 3600), engine)
    if trouble := engine.trouble():
        code = ENDED
        say(f"error: {trouble}")
    if code:
        say(f"exit code {code}; the engine's last lines:\n{engine.tail()}")
    return code


if __name__ == "__main__":
    sys.exit(main())
