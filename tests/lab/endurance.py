"""Two hours at a full queue with pauses for compilers: a supervisor may restart nothing of it.

    python tests/lab/endurance.py --minutes 120 --seed 1          no root, no docker
    python tests/lab/endurance.py --minutes 3 --pace 0.1          a trial

`./start.sh start` with the product's own limits over two ranks of `busyrank.py` on this machine. A
line a minute, the verdict as JSON at the end, in results.json under `stayup.endurance` unless it
was a trial. The verdict counts restarts, errors of the supervisor, requests without an answer, and
at the end a killed worker that must be told, so that a supervisor that sees nothing fails, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import figures
import httpx
from busyrank import COMPILE_S, QUIET_S

from glm_launch.procs import session_members
from glm_launch.state import StateStore
from glm_launch.supervise.desk import Desk

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ANSWER_S = 2 * COMPILE_S[1]
TOLD_S = 5.0
SERVED = "GLM-5.3-Flash-EXL3"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def checkpoint(folder: Path) -> Path:
    """A folder that passes for a model: one tensor and a configuration."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Small"]}))
    header = json.dumps({"x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return folder


@dataclass
class Launch:
    """A supervised launch on this machine; every verb is a process.

    engine: what the ranks are, the real engine when empty. env: settings besides, or instead.
    """

    folder: Path
    engine: str
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        packages = (str(ROOT / name) for name in ("launcher", "bench", "overlay"))
        self.env = {
            "PATH": os.environ["PATH"], "HOME": str(self.folder), "SPEC_METHOD": "none",
            "PYTHONPATH": os.pathsep.join(packages), "GLM_ENV_FILE": str(self.folder / "env"),
            "GLM_STATE_DIR": str(self.folder / "state"), "PORT": str(free_port()),
            "MODEL": str(checkpoint(self.folder / "model")), "MASTER_PORT": str(free_port()),
            "READY_TIMEOUT_S": "120", "STOP_GRACE_S": "2", "SERVED_MODEL_NAME": SERVED,
        } | ({"ENGINE_COMMAND": self.engine} if self.engine else {}) | self.env  # fmt: skip
        self.store = StateStore(Path(self.env["GLM_STATE_DIR"]))
        self.desk = Desk(self.store.folder)

    def verb(self, name: str) -> float:
        """Seconds that it took; raises `CalledProcessError`."""
        begin = time.monotonic()
        command = [sys.executable, "-m", "glm_launch", name]
        subprocess.run(command, env=self.env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - begin

    @property
    def said(self) -> str:
        return self.desk.log.read_text()

    @property
    def generation(self) -> str | None:
        """The one that is watched."""
        saved = self.desk.saved()
        watched = saved is not None and saved.phase == "watching" and self.desk.is_held()
        return saved.generation if saved and watched else None

    def records(self) -> list[dict[str, object]]:
        """What is noted of each rank, the head's first."""
        folder = self.store.launches / str(self.generation)
        return [json.loads(path.read_text()) for path in sorted(folder.glob("rank?.json"))]

    def log(self, rank: int) -> str:
        path = self.store.launches / str(self.generation) / f"rank{rank}.log"
        return path.read_text() if path.exists() else ""

    def ask(self, timeout_s: float) -> int:
        body = {"model": SERVED, "prompt": "x", "max_tokens": 2}
        url = f"http://127.0.0.1:{self.env['PORT']}/v1/completions"
        return httpx.post(url, json=body, timeout=timeout_s).status_code

    def cpu_s(self) -> float:
        """Processor seconds of supervisor, ranks and canary so far, ended children included."""
        saved = self.desk.saved()
        leaders = [record["leader"] for record in self.records()]
        pids = {pid for one in leaders for pid in session_members(_identity(one))}
        if saved is not None:
            pids |= set(session_members(saved.identity))
        return sum(_cpu_s(pid) for pid in pids)


def _identity(value: object):
    from glm_launch.procs import Identity

    assert isinstance(value, dict)
    return Identity(**value)


def _cpu_s(pid: int) -> float:
    try:
        numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, numbers[11:15])) / os.sysconf("SC_CLK_TCK")


class Client(threading.Thread):
    """Asks every few seconds; each request must be answered, however late."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(daemon=True)
        self.launch, self.done = launch, threading.Event()
        self.answers = self.errors = 0
        self.slowest_s = 0.0

    def run(self) -> None:
        while not self.done.wait(10.0):
            begin = time.monotonic()
            try:
                good = self.launch.ask(ANSWER_S) == 200
            except httpx.HTTPError:
                good = False
            if not self.done.is_set():
                self.answers += good
                self.errors += not good
                self.slowest_s = max(self.slowest_s, time.monotonic() - begin)


def pauses(log: str) -> dict[str, dict[str, float]]:
    """Out of a head's log: how often each kind was, for how long altogether, and the longest."""
    found: dict[str, list[float]] = {}
    for kind, seconds in re.findall(r"BUSY ([a-z ]+) ([\d.]+)", log):
        found.setdefault(kind, []).append(float(seconds))
    return {
        kind: {"count": len(values), "sum_s": round(sum(values)), "max_s": max(values)}
        for kind, values in sorted(found.items())
    }


def errors_in(said: str) -> list[str]:
    """What the supervisor told as an error."""
    return [line for line in said.splitlines() if " error [" in line]


def told_after(launch: Launch) -> float | None:
    """Kill the worker; seconds until it is told."""
    pid = launch.records()[1]["engine_pid"]
    assert isinstance(pid, int)
    before, begin = len(launch.said), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while time.monotonic() - begin < 4 * TOLD_S:
        if "error [rank-ended]" in launch.said[before:]:
            return round(time.monotonic() - begin, 2)
        time.sleep(0.05)
    return None


def endure(launch: Launch, minutes: float) -> dict[str, object]:
    """The verdict on a launch that was just started."""
    first, begin, client = launch.generation, time.monotonic(), Client(launch)
    client.start()
    passed = 0
    while passed < minutes:
        time.sleep(max(0.0, begin + 60 * min(passed + 1, minutes) - time.monotonic()))
        passed += 1
        part = launch.log(0).rpartition("BUSY ")[2].strip().splitlines()[:1]
        say(
            f"{min(passed, minutes):g}/{minutes:g} min: {launch.generation}, "
            f"{client.answers} answers, {client.errors} errors, {part}, cpu {launch.cpu_s():.0f} s"
        )
        if launch.generation != first:
            break
    saved, seconds = launch.desk.saved(), time.monotonic() - begin
    client.done.set()
    verdict: dict[str, object] = {
        "minutes": round(seconds / 60, 1), "same_launch": launch.generation == first,
        "false_restarts": saved.restarts_total if saved else None,
        "errors_told": errors_in(launch.said), "pauses": pauses(launch.log(0)),
        "longest_quiet_stall_s": QUIET_S,
        "told": dict(Counter(re.findall(r"\[([a-z-]+)\]", launch.said))),
        "answers": client.answers, "failed_requests": client.errors,
        "slowest_answer_s": round(client.slowest_s, 1),
        "cpu_percent_of_a_core": round(100 * launch.cpu_s() / seconds, 1),
    }  # fmt: skip
    verdict["killed_worker_told_s"] = told_after(launch) if verdict["same_launch"] else None
    verdict["passed"] = passes(verdict)
    return verdict


def passes(verdict: dict[str, object]) -> bool:
    told = verdict["killed_worker_told_s"]
    return bool(
        verdict["same_launch"] and verdict["false_restarts"] == 0 and not verdict["errors_told"]
        and not verdict["failed_requests"] and verdict["answers"]
        and isinstance(told, float) and told <= TOLD_S
    )  # fmt: skip


def say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pace", type=float, default=1.0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="endurance-") as temporary:
        rank = f"{sys.executable} {HERE / 'busyrank.py'} --seed {chosen.seed} --pace {chosen.pace}"
        launch = Launch(Path(temporary), rank)
        try:
            say(f"READY after {launch.verb('start'):.1f} s")
            verdict = endure(launch, chosen.minutes) | {"seed": chosen.seed} | figures.here()
            if not verdict["passed"]:
                say(launch.said)
        finally:
            launch.verb("stop")
    say(json.dumps(verdict, indent=1))
    if chosen.pace == 1.0:
        figures.note("endurance", verdict)
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
