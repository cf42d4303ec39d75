"""Limits of the quality gate from measured noise: `python -m nano.gate MEASURED METRICS`.

MEASURED is what `nano.panel measure` wrote. The served model answers the same panel as the training
modules did, so its noise is that of other arithmetic on the same texts: BF16 against packed, text
by text. A limit lies four standard deviations of that from the mean that was measured: by bootstrap
over the prompts for drafts, from the spread over the texts for losses, binomial for keys. The
limits are written to METRICS under `gate`, next to the noise they come from.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nano.evaluate import Walks, per_step
from nano.panel import NEEDLES

SIGMAS = 4.0
RESAMPLES = 4000
SERVED = "full-4bpw"


def difference_noise(first: Walks, second: Walks) -> float:
    """Standard deviation, over resampled prompts, of the difference in accepted drafts a step."""
    chance = random.Random(0)
    pairs = list(zip(first, second, strict=True))
    drawn = []
    for _ in range(RESAMPLES):
        ours, theirs = zip(*chance.choices(pairs, k=len(pairs)), strict=True)
        drawn.append(per_step(ours) - per_step(theirs))
    return statistics.stdev(drawn)


def drafts_limit(own: Walks, served: Walks) -> dict[str, float]:
    """The least accepted drafts a step on the panel's prompts; `own` are BF16's walks."""
    mean, spread = per_step(served), difference_noise(own, served)
    return rounded(mean=mean, sigma=spread, limit=mean - SIGMAS * spread)


def loss_limit(own: Sequence[float], packed: Sequence[float]) -> dict[str, float]:
    """The most that a packed model's loss on the panel's texts may lie above BF16's."""
    above = [second - first for first, second in zip(own, packed, strict=True)]
    mean = statistics.mean(above)
    spread = statistics.stdev(above) / len(above) ** 0.5
    return rounded(mean=mean, sigma=spread, limit=mean + SIGMAS * spread)


def needle_limit(share: float) -> dict[str, float]:
    """The least keys found of the gate's registers, each asked for one key."""
    spread = (share * (1 - share) / NEEDLES) ** 0.5
    least = max(1, int(NEEDLES * (share - SIGMAS * spread)) + 1)
    return {"mean": share, "sigma": round(spread, 4), "limit": least / NEEDLES}


def rounded(**values: float) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def gate(measured: dict[str, Any], needle: float) -> dict[str, Any]:
    """Everything that the gate (`tests/engine/test_nano_*.py`) compares with."""
    own = measured["bf16"]
    return {
        "sigmas": SIGMAS,
        "bf16_losses": own["losses"],
        "loss_above_bf16": {
            name: loss_limit(own["losses"], found["losses"])
            for name, found in measured.items()
            if name != "bf16"
        },
        "needle": needle_limit(needle),
        **{key: drafts_limit(own[key], measured[SERVED][key]) for key in ("mtp", "dflash")},
    }


def main() -> None:
    measured, metrics = map(Path, sys.argv[1:])
    figures = json.loads(metrics.read_text())
    figures["gate"] = gate(json.loads(measured.read_text()), figures["needle"]["4bpw"])
    metrics.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
