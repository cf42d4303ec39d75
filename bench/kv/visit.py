"""Everything about the KV cache that one H200 must show, within a budget of seconds.

    python -m kv.visit WORK [--seconds 480] [--only tests,text,turns,kernels]

Steps, each a process of its own with a limit: `tests` (tests/gpu of attention and indexer), `text`
(`e2e.attention_text`), `turns` (`kvcache.turns`), `kernels` (`kv.measure`, which takes what is
left). Prints one line per step and writes `bench/expected/h200-1x/kv.json`, or `--expected`, after
each: `fixed_cost_ratio`, `prefix_reuse_second_turn`, `decode_worst_ratio` and
`prefill_worst_ratio` of 64 heads (one rank), `worst_ratio_by_heads`, the layouts' mean KL,
`kernel_tests_passed`, `attention_text_passed`. Exit status 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.plugged import ROOT, python_path

EXPECTED = ROOT / "bench" / "expected" / "h200-1x" / "kv.json"
ARITHMETIC = ROOT / "bench" / "expected" / "arithmetic" / "kv.json"
TESTS = ("tests/gpu/test_attention.py", "tests/gpu/test_indexer.py")
PYTEST = ("-q", "-p", "no:cacheprovider", "--confcutdir=tests/gpu")  # no xdist there
LEAST_S = 15.0
ONE_RANK = "64"  # heads
TIMED_OUT = 124


@dataclass(frozen=True)
class Step:
    """A command with the most seconds it may take; `{left}` in it is what it may plan for."""

    name: str
    command: tuple[str, ...]
    limit_s: float


def steps(work: Path, tiny: Path | None = None) -> list[Step]:
    text = ("-m", "e2e.attention_text", str(work / "text"), "--out", str(work / "text.json"),
            "--tiny", str(tiny or work), "--at-once", "3", "--memory-gib", "8")  # fmt: skip
    turns = ("-m", "kvcache.turns", str(work / "turns"), "--out", str(work / "turns.json"),
             "--memory-gib", "8")  # fmt: skip
    kernels = ("-m", "kv.measure", str(work / "kernels.json"), "--seconds", "{left}")
    return [
        Step("tests", ("-m", "pytest", *PYTEST, *TESTS), 100),
        Step("text", (*text, "--seconds", "{left}"), 220),
        Step("turns", turns, 150),
        Step("kernels", kernels, 300),
    ]


def run(step: Step, work: Path, left_s: float) -> tuple[int, str]:
    """Exit status, 124 at the limit, and the last line of the output, which lies in WORK."""
    limit = min(step.limit_s, left_s)
    words = [word.replace("{left}", f"{limit - LEAST_S:.0f}") for word in step.command]
    env = {**os.environ, "PYTHONPATH": python_path(work)}
    log = work / f"{step.name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=env, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = TIMED_OUT
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = log.read_text(errors="replace").strip().splitlines()
    return code, lines[-1] if lines else ""


def figures(work: Path, status: Mapping[str, int]) -> dict[str, Any]:
    """What the results in WORK say, as far as they are there."""
    found: dict[str, Any] = {}
    if "tests" in status:
        found["kernel_tests_passed"] = status["tests"] == 0
    arithmetic = json.loads(ARITHMETIC.read_text())
    found["fixed_cost_ratio"] = arithmetic["fixed_cost_ratio"]
    for name in ("text", "turns", "kernels"):
        path = work / f"{name}.json"
        if name not in status or not path.exists():
            continue
        result = json.loads(path.read_text())
        if name == "turns":
            found |= result
        elif name == "kernels":
            by_heads = result["verdict"].get("by_heads", {})
            one_rank = by_heads.get(ONE_RANK, result["verdict"])
            found |= {k: one_rank[k] for k in ("decode_worst_ratio", "prefill_worst_ratio")}
            found |= {"worst_ratio_by_heads": by_heads} if by_heads else {}
            found["kernels"] = result
        else:
            found["attention_text_passed"] = result.get("attention_text_passed", False)
            found["attention_text"] = result["models"]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kv.visit")
    parser.add_argument("work", type=Path)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--expected", type=Path, default=EXPECTED)
    parser.add_argument("--tiny", type=Path, help="where the tiny checkpoint is or gets; WORK")
    parser.add_argument("--machine", default="1x NVIDIA H200")
    asked = parser.parse_args(arguments)
    work = asked.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    began, status = time.monotonic(), dict[str, int]()
    for step in steps(work, asked.tiny):
        left = asked.seconds - (time.monotonic() - began)
        if (asked.only and step.name not in asked.only) or left < 2 * LEAST_S:
            continue
        start = time.monotonic()
        status[step.name], said = run(step, work, left)
        print(
            f"{step.name}: {status[step.name]}, {time.monotonic() - start:.0f} s: {said}",
            flush=True,
        )
        old = json.loads(asked.expected.read_text()) if asked.expected.exists() else {}
        record = {**old, **figures(work, status)}
        record |= {"machine": asked.machine, "date": time.strftime("%Y-%m-%d")}
        asked.expected.parent.mkdir(parents=True, exist_ok=True)
        asked.expected.write_text(json.dumps(record, indent=1) + "\n")
    return int(not status or any(status.values()))


if __name__ == "__main__":
    sys.exit(main())
