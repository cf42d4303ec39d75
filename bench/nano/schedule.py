"""Training by the clock: the share of a time budget, the learning-rate ramp, the run's log."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor


def ramp(progress: float, warm: float, hold: float) -> float:
    """Learning-rate factor: linear warm-up to `warm`, flat to `hold`, linear to 2 % at 1."""
    if progress < warm:
        return progress / warm
    return max(0.02, min(1.0, (1.0 - progress) / (1.0 - hold)))


def clock(seconds: float) -> Iterator[float]:
    """Yield the share of the time budget used, until it is used up."""
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < seconds:
        yield passed / seconds


def log(out: Path, phase: str, step: int, progress: float, values: dict[str, Tensor]) -> None:
    """Append one line to `out/log.jsonl`; every 200 steps print it. Stops at values not finite."""
    numbers = {name: round(float(value.detach()), 4) for name, value in values.items()}
    if not all(math.isfinite(number) for number in numbers.values()):
        raise SystemExit(f"{phase}: not finite at step {step}: {numbers}")
    record = {"phase": phase, "step": step, "progress": round(progress, 4), **numbers}
    with (out / "log.jsonl").open("a") as stream:
        stream.write(json.dumps(record) + "\n")
    if step % 200 == 0:
        print(f"{time.monotonic():.0f} {record}", flush=True)
