"""Whole steps of the dense recode: one engine per scheme with random weights, and the targets.

`e2e.inside` runs once per scheme with `--load-format exl3_dummy` on one rank of two of the `tr3`
family. Graphs exist for one and for sixteen requests only, so that a start is short. An engine that
fails leaves its error in the result and the next one starts; without `off` there is no ratio, so
its failure ends the run. Schemes that have targets come first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS, BITS = 2, 6
SCHEMES = ("off", "fp8", "int8", "exl3")
ORDER = ("off", "fp8", "exl3", "int8")
ENGINE: Mapping[str, Any] = {
    "load_format": "exl3_dummy",
    "max_model_len": 40960,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 16,
    "language_model_only": True,
    "skip_tokenizer_init": True,
    "cudagraph_capture_sizes": [1, 16],
}
MEASURES: tuple[Mapping[str, Any], ...] = (
    {"kind": "decode", "requests": 1, "context": 1024, "tokens": 64},
    {"kind": "decode", "requests": 16, "context": 1024, "tokens": 48},
    {"kind": "prefill", "context": 8192},
    {"kind": "prefill", "context": 32768},
)
FIGURES = ("step_ratio", "step16_ratio", "prefill8k_ratio", "prefill32k_ratio")


@dataclass(frozen=True)
class Target:
    """A figure and its limit; `least` when more is better."""

    figure: str
    limit: float
    least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.limit if self.least else value <= self.limit


STEP_TARGETS = (
    Target("fp8_step_ratio", 0.85),
    Target("exl3_step_ratio", 0.88),
    *(
        Target(f"{scheme}_{figure}", 0.97, least=True)
        for scheme in ("fp8", "exl3")
        for figure in FIGURES[2:]
    ),
)
OWN_TARGETS = (Target("fp8_own_ratio", 0.58), Target("exl3_own_ratio", 0.60))


def judge(figures: Mapping[str, float], targets: Sequence[Target]) -> int:
    """Print a line per target; 1 unless all were measured and met."""
    good = True
    for target in targets:
        value = figures.get(target.figure)
        met = value is not None and target.met(value)
        word = "ok" if met else "MISSED" if value is not None else "NOT MEASURED"
        side = "at least" if target.least else "at most"
        print(f"recode: {target.figure} {value}: {word}, {side} {target.limit}", flush=True)
        good &= met
    return int(not good)


def schemes(text: str) -> list[str]:
    """Names out of `a,b`, `off` first. Raises ArgumentTypeError for others."""
    wanted = text.split(",")
    if unknown := sorted(set(wanted) - set(SCHEMES)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(SCHEMES)}")
    return [name for name in ORDER if name in wanted or name == "off"]


def prepare(work: Path, env: Mapping[str, str]) -> Path:
    """The folder of headers, and with `exl3` in the environment the cache that belongs to it."""
    folder, staged = work / "tr3", work / "tr3.new"
    if not folder.exists():
        dummy = ["--family", "tr3", "--ranks", str(RANKS), "--out", str(staged)]
        subprocess.run([sys.executable, "-m", "glm_exl3.dummy", *dummy], check=True)
        staged.rename(folder)
    if env["GLM_EXL3_DENSE_RECODE"] == "exl3":
        command = [sys.executable, "-m", "glm_exl3.recode", str(folder), "--headers-only"]
        subprocess.run(command, env=dict(env), check=True)
    return folder


def environment(work: Path, scheme: str) -> dict[str, str]:
    """What makes an engine serve `scheme`."""
    return {
        **os.environ,
        "GLM_EXL3_DENSE_RECODE": scheme,
        "GLM_EXL3_DENSE_BITS": str(BITS),
        "GLM_EXL3_DENSE_CACHE": str(work / "cache"),
    }


def run_step(work: Path, scheme: str, limit_s: float) -> dict[str, Any]:
    """What one engine measured; `error` instead, or beside it, when it did not get to its end."""
    job, result = work / f"{scheme}-job.json", work / f"{scheme}.json"
    result.unlink(missing_ok=True)
    env = environment(work, scheme)
    found: dict[str, Any] = {"rows": []}
    try:
        engine = {**ENGINE, "model": str(prepare(work, env))}
        job.write_text(json.dumps({"engine": engine, "measure": MEASURES}))
        command = [sys.executable, "-m", "e2e.inside", str(job), str(result)]
        subprocess.run(command, env=env, check=True, timeout=limit_s)
    except subprocess.SubprocessError as error:
        found["error"] = str(error)[:300]
    return found | (json.loads(result.read_text()) if result.exists() else {})


def step_ratios(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Step time, and prefill rate, of every scheme over those of `off`."""
    figures: dict[str, float] = {}

    def value(scheme: str, index: int) -> float:
        row = results[scheme]["rows"][index]
        return float(row["step_ms"] if row["kind"] == "decode" else row["seconds"])

    for scheme in results:
        if scheme == "off":
            continue
        for index, name in enumerate(FIGURES):
            rows = [results[s]["rows"] for s in ("off", scheme)]
            if all(len(row) > index and "error" not in row[index] for row in rows):
                ratio = value(scheme, index) / value("off", index)
                if name.startswith("prefill"):
                    ratio = 1 / ratio
                figures[f"{scheme}_{name}"] = round(ratio, 4)
    return figures


def measure(work: Path, result: Path, wanted: Sequence[str], budget_s: float) -> dict[str, float]:
    """The ratios; `result` is written after every engine. None starts that would not get done."""
    work.mkdir(parents=True, exist_ok=True)
    begin, longest = time.monotonic(), 0.0
    results: dict[str, Any] = {}
    figures: dict[str, float] = {}
    for scheme in wanted:
        since = time.monotonic()
        left = budget_s - (since - begin)
        if left <= longest:
            print(f"{scheme}: left out, {left:.0f} s are left, the longest took {longest:.0f} s")
            continue
        results[scheme] = run_step(work, scheme, left)
        spent = time.monotonic() - since
        longest = max(longest, spent)
        results[scheme]["spent_s"] = round(spent, 1)
        figures = step_ratios(results)
        result.write_text(json.dumps({"results": results, "ratios": figures}, indent=1))
        failed = results[scheme].get("error", "")
        print(f"{scheme}: {spent:.0f} s", failed or figures, flush=True)
        if scheme == "off" and not results["off"]["rows"]:
            print("off: nothing was measured, so there is no ratio: its log says why")
            break
    return figures
