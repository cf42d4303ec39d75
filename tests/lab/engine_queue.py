"""The real engine on the CPU at a full queue, supervised: no false restart, and what a kill costs.

    OMP_NUM_THREADS=1 nice python tests/lab/engine_queue.py --minutes 20     no root, no docker

`./start.sh start` with the miniature of this repository, two ranks, DFlash2 drafting and the
product's limits; CLIENTS requests at once for SEATS seats. A line a minute, the verdict as JSON,
in results.json under `stayup.engine_queue`. At the end a worker is killed under that load: it must
be told in TOLD_S, and the engine be READY within a cold start and SLACK_S. With --port the API
stays at one address, so that Prometheus can watch (tests/compose/draw_dashboard.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import endurance
import figures
import httpx
from endurance import ROOT, SERVED, TOLD_S, Launch, say

from glm_launch.supervise.eyes import counters

SEATS, CLIENTS = 4, 10
SLACK_S = 60.0
LOOK_S = 2.0
WORDS = ("time", "year", "people", "way", "day", "thing", "life", "child", "world", "school")
MODELS = ROOT / "bench" / "nano" / "model"


@dataclass
class Load:
    """CLIENTS threads that ask without a pause; a failure is an answer, too."""

    url: str
    generator: random.Random
    done: threading.Event = field(default_factory=threading.Event)
    answers: Counter[str] = field(default_factory=Counter)
    tokens: int = 0

    def start(self) -> None:
        for _ in range(CLIENTS):
            threading.Thread(target=self.ask_on, daemon=True).start()

    def ask_on(self) -> None:
        while not self.done.is_set():
            prompt = " ".join(self.generator.choices(WORDS, k=self.generator.randint(5, 120)))
            tokens = self.generator.randint(16, 128)
            try:
                self.ask(prompt, tokens)
            except httpx.HTTPError as error:
                self.answers[type(error).__name__] += not self.done.is_set()
                time.sleep(1.0)

    def ask(self, prompt: str, tokens: int) -> None:
        body = {"model": SERVED, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=1200)
        self.answers[str(reply.status_code)] += 1
        self.tokens += tokens if reply.status_code == 200 else 0


@dataclass
class Samples:
    """The engine's counters every LOOK_S; `quiet_s` is the longest time without a step."""

    url: str
    taken: int = 0
    full: int = 0
    late: int = 0
    quiet_s: float = 0.0
    steps: float = -1.0
    since: float = 0.0

    def take(self) -> None:
        now = time.monotonic()
        try:
            text = httpx.get(f"{self.url}/metrics", timeout=30).text
        except httpx.HTTPError:
            self.late += 1
            return
        seen = counters(text)
        if seen is None:
            return
        waiting = sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines()
            if line.startswith("vllm:num_requests_waiting{")
        )  # fmt: skip
        self.taken += 1
        self.full += seen.running >= SEATS and waiting > 0
        if seen.steps != self.steps:
            self.steps, self.since = seen.steps, now
        self.quiet_s = max(self.quiet_s, now - self.since)


def watch(launch: Launch, load: Load, minutes: float) -> dict[str, Any]:
    """What was seen in `minutes` at a full queue."""
    first, begin, samples = launch.generation, time.monotonic(), Samples(load.url)
    told = 0
    while (passed := time.monotonic() - begin) < 60 * minutes and launch.generation == first:
        samples.take()
        if passed // 60 > told:
            told += 1
            say(f"{told}/{minutes:g} min: {dict(load.answers)}, quiet {samples.quiet_s:.0f} s")
        time.sleep(LOOK_S)
    saved = launch.desk.saved()
    return {
        "minutes": round(passed / 60, 1), "same_launch": launch.generation == first,
        "false_restarts": saved.restarts_total if saved else None,
        "errors_told": endurance.errors_in(launch.said), "seats": SEATS, "clients": CLIENTS,
        "full_queue_percent": round(100 * samples.full / max(1, samples.taken), 1),
        "longest_without_a_step_s": round(samples.quiet_s, 1), "counters_late": samples.late,
        "answers": dict(load.answers), "tokens": load.tokens,
    }  # fmt: skip


def kill_worker(launch: Launch, cold_s: float) -> dict[str, Any]:
    """The cost of a dead worker under load; `back_s` counts from its death."""
    before, begin = launch.generation, time.monotonic()
    told_s = endurance.told_after(launch)
    while launch.generation in (None, before) and time.monotonic() - begin < cold_s + 4 * SLACK_S:
        time.sleep(0.2)
    back_s = time.monotonic() - begin
    return {
        "killed_worker_told_s": told_s, "killed_worker_back_s": round(back_s, 1),
        "cold_start_s": round(cold_s, 1), "answers_again": launch.ask(300.0) == 200,
    }  # fmt: skip


def passes(verdict: dict[str, Any]) -> bool:
    told_s = verdict["killed_worker_told_s"]
    return bool(
        verdict["same_launch"] and verdict["false_restarts"] == 0 and not verdict["errors_told"]
        and set(verdict["answers"]) == {"200"} and verdict["full_queue_percent"] > 50
        and told_s is not None and told_s <= TOLD_S and verdict["answers_again"]
        and verdict["killed_worker_back_s"] <= verdict["cold_start_s"] + SLACK_S
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--port", type=int)
    parser.add_argument("--state", type=Path, help="the state folder; kept")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="engine-queue-") as temporary:
        launch = Launch(Path(temporary), "", {
            "MODEL": str(MODELS / "full-4bpw"), "DFLASH_MODEL": str(MODELS / "drafter"),
            "SPEC_METHOD": "dflash", "MAX_MODEL_LEN": "2048", "MAX_NUM_SEQS": str(SEATS),
            "LANGUAGE_MODEL_ONLY": "1", "READY_TIMEOUT_S": "900", "STOP_GRACE_S": "5",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        } | ({"PORT": str(chosen.port)} if chosen.port else {})
          | ({"GLM_STATE_DIR": str(chosen.state)} if chosen.state else {}))  # fmt: skip
        url = f"http://127.0.0.1:{launch.env['PORT']}"
        load = Load(url, random.Random(1))
        try:
            cold_s = launch.verb("start")
            say(f"READY after {cold_s:.1f} s")
            load.start()
            verdict = watch(launch, load, chosen.minutes)
            verdict |= kill_worker(launch, cold_s)
            verdict |= {"passed": passes(verdict)} | figures.here()
            say(launch.said)
        finally:
            load.done.set()
            launch.verb("stop")
    say(json.dumps(verdict, indent=1))
    figures.note("engine_queue", verdict)
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
