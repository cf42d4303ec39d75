"""A fake rank whose counters look like those of an engine at a full queue, with its pauses.

    busyrank.py --seed 1 --pace 1.0 serve MODEL ...         the rest as fakerank.py

What: `schedule` draws what the engine does next: steps of irregular length, long prefills, stalls
like a garbage collection's, pauses for a compiler (a child with its name runs, then the first step
takes a while), counters that answer late, short drains without requests. Why: a supervisor must
restart nothing of this. `pace` shortens all times, for a trial. Each pause is a line of the log,
`BUSY KIND SECONDS`. What must stay true: no stall but a compiler's is longer than QUIET_S, no
compiler works longer than COMPILE_S.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fakerank
from fakerank import State, say

SEATS = 16
QUIET_S = 50.0
COMPILE_S = (30.0, 1200.0)
SETTLE_S = 25.0
COMPILERS = ("nvcc", "cicc", "ptxas", "ninja", "cc1plus")
WEIGHTS = {"steps": 70, "prefill": 10, "collect": 6, "late counters": 6, "compile": 5, "drain": 3}


@dataclass(frozen=True)
class Part:
    """What the engine does for `seconds`; `settle_s`: from a compiler's end to the next step."""

    kind: str
    seconds: float
    settle_s: float = 0.0


def schedule(generator: random.Random) -> Iterator[Part]:
    """Endless; the first compiler comes early, so that a short run has one, too."""
    yield Part("steps", 5.0)
    yield Part("compile", 75.0, 12.0)
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    while True:
        kind = generator.choices(kinds, weights)[0]
        if kind == "compile":
            low, high = COMPILE_S
            seconds = low * (high / low) ** generator.random()
            yield Part(kind, seconds, generator.uniform(0.5, SETTLE_S))
        else:
            top = {"steps": 60.0, "prefill": 20.0, "collect": QUIET_S, "late counters": QUIET_S,
                   "drain": 150.0}[kind]  # fmt: skip
            yield Part(kind, generator.uniform(top / 10, top))


class Engine(threading.Thread):
    """Lives through the schedule; requests of real clients wait for a step."""

    def __init__(self, seed: int, pace: float) -> None:
        super().__init__(daemon=True)
        self.generator, self.pace = random.Random(seed), pace
        self.tools = Path(tempfile.mkdtemp(prefix="busyrank-"))
        for name in COMPILERS:
            shutil.copy2("/bin/sleep", self.tools / name)
        self.late_s = 0.0
        self.busy = True

    def run(self) -> None:
        for part in schedule(self.generator):
            say(f"BUSY {part.kind} {part.seconds * self.pace:.1f}")
            self.live(part)
            self.work(self.generator.uniform(2.0, 20.0) * self.pace)

    def live(self, part: Part) -> None:
        seconds = part.seconds * self.pace
        if part.kind == "steps":
            self.work(seconds)
        elif part.kind == "compile":
            self.compile(seconds)
            time.sleep(part.settle_s * self.pace)
        elif part.kind == "late counters":
            self.late_s = self.generator.uniform(1.0, 12.0)
            self.work(seconds)
            self.late_s = 0.0
        elif part.kind == "drain":
            self.busy = False
            time.sleep(seconds)
            self.busy = True
        else:
            time.sleep(seconds)

    def work(self, seconds: float) -> None:
        """Steps of 0.1 s in the middle, now and then of two seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(2.0, self.generator.lognormvariate(-2.3, 0.8)))
            while State.stalled:
                time.sleep(0.1)
            State.tokens += 1

    def compile(self, seconds: float) -> None:
        """One build system all the time, or one compiler after the other with gaps between."""
        end = time.monotonic() + seconds
        if self.generator.random() < 0.5:
            subprocess.run([self.tools / "ninja", f"{seconds:.1f}"], check=True)
        while (left := end - time.monotonic()) > 0:
            name = self.generator.choice(COMPILERS)
            some = min(left, self.generator.uniform(4.0, 40.0))
            subprocess.run([self.tools / name, f"{some:.1f}"], check=True)
            time.sleep(self.generator.uniform(0.1, 12.0) * self.pace)


class BusyApi(fakerank.Api):
    engine: Engine

    def do_GET(self) -> None:
        if self.path != "/metrics":
            return super().do_GET()
        time.sleep(self.engine.late_s)
        self.reply(200, self.counters())
        return None

    def counters(self) -> str:
        seats = SEATS if self.engine.busy else State.running
        return (
            f"vllm:num_requests_running {seats}\n"
            f"vllm:num_requests_waiting {3 * SEATS if self.engine.busy else 0}\n"
            f"vllm:iteration_tokens_total_count {State.tokens}\n"
        )

    def complete(self, body: dict) -> None:
        """Answered after the next step, as a request in a batch is; idle engines step for it."""
        before = State.tokens
        while self.engine.busy and State.tokens == before:
            time.sleep(0.2)
        super().complete(body)


def main(arguments: list[str]) -> None:
    seed, pace = int(option(arguments, "--seed")), float(option(arguments, "--pace"))
    sys.argv = [sys.argv[0], *arguments]
    if "--headless" not in arguments:
        BusyApi.engine = Engine(seed, pace)
        fakerank.Api = BusyApi  # type: ignore[misc]
        fakerank.ready = BusyApi.engine.start
    fakerank.main()


def option(arguments: list[str], name: str) -> str:
    """Take an option and its value out of the arguments."""
    index = arguments.index(name)
    value = arguments[index + 1]
    del arguments[index : index + 2]
    return value


if __name__ == "__main__":
    main(sys.argv[1:])
