"""Asks the engine for one token when nobody else does, and notes what it sees in health.json.

    canary.py FILE [--generation G] [--url http://HOST:PORT --model NAME] [--root PID ...]
              [--parent PID] [--idle-s 60] [--answer-s 30]

What: every LOOK_S seconds it reads the engine's counters and whether a compiler runs, and when the
engine was idle for IDLE_S it asks for one token. Why: `/health` stays 200 while a worker is dead,
and an idle engine has no counter that could stand still. Who: process 1 of every node starts one;
without `--url` (a worker) it only looks for compilers. It is the only one that sends canaries; the
health check and whoever decides about restarts read FILE. The key comes from VLLM_API_KEY.

What must stay true: it ends when its parent does, however early; no canary before the first step (a
model that still loads is not idle) and none while requests run; a canary that failed counts only if
the engine made no step meanwhile, since an engine that works for others is alive; FILE is one line,
replaced whole:

    {"beat": 7, "generation": G, "running": 0, "waiting": 0, "steps": 12, "compiling": [],
     "failures": 0, "answer_s": 0.2}        running, waiting, steps: null while unknown
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

LOOK_S = 2.0
IDLE_S = 60.0
ANSWER_S = 30.0
AGAIN_S = 5.0
COUNTERS_S = 5.0
COUNTERS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "steps": "vllm:iteration_tokens_total_count",
}
COMPILERS = frozenset({
    "nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink", "ninja", "cc1", "cc1plus", "gcc",
    "g++", "clang", "clang++", "as", "ld", "collect2",
})  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """The engine's counters; `waiting` requests are queued."""

    running: float
    waiting: float
    steps: float


def parse(text: str) -> Seen | None:
    """Counters out of Prometheus text, summed over engines; None when one is missing."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        bare = name.partition("{")[0]
        if bare in COUNTERS.values():
            with suppress(ValueError):
                sums[bare] = sums.get(bare, 0.0) + float(value)
    if len(sums) < len(COUNTERS):
        return None
    return Seen(*(sums[name] for name in COUNTERS.values()))


@dataclass
class Canary:
    """When to ask, and what the answers mean; no clock and no network of its own."""

    idle_s: float = IDLE_S
    proof: float | None = None
    steps: float = 0.0
    failures: int = 0
    answer_s: float | None = None
    asked: float | None = None
    again: float = 0.0

    def see(self, seen: Seen | None, now: float) -> None:
        """A step since the last look is as good as an answer."""
        if seen is None:
            return
        if seen.steps != self.steps:
            self.steps, self.failures = seen.steps, 0
            if seen.steps > 0:
                self.proof = now

    def due(self, seen: Seen | None, now: float) -> bool:
        """Whether to ask now."""
        if self.proof is None or self.asked is not None or now < self.again:
            return False
        busy = seen is not None and (seen.running or seen.waiting) and not self.failures
        return not busy and now - self.proof >= self.idle_s

    def answered(self, seconds: float | None, now: float) -> None:
        """The answer of a canary: how long it took, or None when there was none."""
        self.asked = None
        self.answer_s = seconds
        if seconds is None:
            self.failures += 1
            self.again = now + AGAIN_S
        else:
            self.failures, self.proof = 0, now


def compilers(processes: Iterable[tuple[int, int, str]], *roots: int) -> list[str]:
    """Names of compilers among the descendants of `roots`; processes are (pid, parent, name)."""
    known = {pid: (parent, name) for pid, parent, name in processes}

    def below(pid: int) -> bool:
        for _ in known:
            if pid in roots or pid not in known:
                break
            pid = known[pid][0]
        return pid in roots

    return sorted(name for pid, (_, name) in known.items() if name in COMPILERS and below(pid))


def processes(proc: Path = Path("/proc")) -> Iterable[tuple[int, int, str]]:
    """All processes that can be seen: pid, parent, name."""
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                yield int(entry.name), int(rest.split()[1]), name


def request(url: str, path: str, body: object, key: str, timeout_s: float) -> str:
    """The body of a 200; raises OSError or `http.client.HTTPException` for anything else."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, headers)
        reply = connection.getresponse()
        text = reply.read().decode("utf-8", "replace")
    finally:
        connection.close()
    if reply.status != 200:
        raise http.client.HTTPException(f"HTTP {reply.status}")
    return text


@dataclass
class Watcher:
    """The loop around `Canary`; `url` is empty on a worker."""

    file: Path
    generation: str
    url: str
    model: str
    roots: Sequence[int]
    key: str = ""
    clock: Callable[[], float] = time.monotonic
    canary: Canary = field(default_factory=Canary)
    answer_s: float = ANSWER_S
    beat: int = 0

    def look(self) -> None:
        """One look, one canary if due, one line in the file."""
        seen = self._counters() if self.url else None
        now = self.clock()
        self.canary.see(seen, now)
        if self.url and self.canary.due(seen, now):
            self.canary.asked = now
            threading.Thread(target=self._ask, daemon=True).start()
        self._write(seen)

    def _counters(self) -> Seen | None:
        with suppress(OSError, http.client.HTTPException):
            return parse(request(self.url, "/metrics", None, self.key, COUNTERS_S))
        return None

    def _ask(self) -> None:
        body = {"model": self.model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        begin, seconds = self.clock(), None
        with suppress(OSError, http.client.HTTPException):
            request(self.url, "/v1/completions", body, self.key, self.answer_s)
            seconds = round(self.clock() - begin, 3)
        self.canary.answered(seconds, self.clock())

    def _write(self, seen: Seen | None) -> None:
        self.beat += 1
        line = {
            "beat": self.beat, "generation": self.generation,
            "running": seen and seen.running, "waiting": seen and seen.waiting,
            "steps": seen and seen.steps, "compiling": compilers(processes(), *self.roots),
            "failures": self.canary.failures, "answer_s": self.canary.answer_s,
        }  # fmt: skip
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            draft = self.file.with_suffix(".tmp")
            draft.write_text(json.dumps(line) + "\n")
            draft.replace(self.file)


def option(argv: Sequence[str], flag: str, default: str) -> str:
    """The value of `--flag value` or `--flag=value`."""
    for index, part in enumerate(argv):
        if part == flag and index + 1 < len(argv):
            return argv[index + 1]
        if part.startswith(f"{flag}="):
            return part.partition("=")[2]
    return default


def command(
    file: Path, generation: str, root: int, engine: Sequence[str], node_rank: int
) -> list[str]:
    """How process 1 starts this program beside an engine with the arguments `engine`."""
    argv = [sys.executable, __file__, str(file), "--generation", generation, "--root", str(root)]
    argv += ["--parent", str(os.getpid())]
    if node_rank:
        return argv
    host = option(engine, "--host", "127.0.0.1")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (compared, not bound)
    url = f"http://{f'[{host}]' if ':' in host else host}:{option(engine, '--port', '8000')}"
    served = [*engine, ""][engine.index("serve") + 1] if "serve" in engine else ""
    return [*argv, "--url", url, "--model", option(engine, "--served-model-name", served)]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--generation", default="")
    parser.add_argument("--url", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--root", type=int, nargs="+", default=[1])
    parser.add_argument("--parent", type=int, default=os.getppid())
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    parser.add_argument("--answer-s", type=float, default=ANSWER_S)
    chosen = parser.parse_args(arguments)
    watcher = Watcher(
        chosen.file, chosen.generation, chosen.url, chosen.model, chosen.root,
        os.environ.get("VLLM_API_KEY", ""), canary=Canary(chosen.idle_s),
        answer_s=chosen.answer_s,
    )  # fmt: skip
    while os.getppid() == chosen.parent:
        watcher.look()
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1:])
