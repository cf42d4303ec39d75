"""Draw the loss curves of training runs: `python -m nano.plot OUT.png LOG.jsonl...`.

Upper panel: the target's training loss (smoothed, nats a token, needle answers weighted) with the
5-gram baseline of metrics.json; lower panel: the losses of what is trained beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

SMOOTH = 9
METRICS = Path(__file__).with_name("metrics.json")


def records(paths: list[Path]) -> list[dict[str, Any]]:
    """All log lines of the runs; of each phase the run that came last counts."""
    by_phase: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for phase in {line["phase"] for line in lines}:
            by_phase[phase] = [line for line in lines if line["phase"] == phase]
    return [line for lines in by_phase.values() for line in lines]


def smoothed(values: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Running mean that keeps the length."""
    padded = np.pad(np.asarray(values), SMOOTH // 2, mode="edge")
    return np.convolve(padded, np.ones(SMOOTH) / SMOOTH, mode="valid")


def draw(out: Path, lines: list[dict[str, Any]], baseline: float) -> None:
    """Write the figure."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(7, 7), constrained_layout=True)
    series = (
        ("loss", "target", upper),
        ("mtp", "MTP to the target's distribution", lower),
        ("index", "indexer KL", lower),
        ("paired", "drafter to the target's distribution", lower),
    )
    for key, label, axis in series:
        found = [(line["step"], line[key]) for line in lines if key in line]
        if found:
            steps, values = zip(*found, strict=True)
            axis.plot(steps, smoothed(list(values)), label=label)
    upper.axhline(baseline, color="grey", linestyle="--", label="5-gram on held-out text")
    upper.set_ylim(0.5, 4.0)
    for axis in (upper, lower):
        axis.set_xlabel("step")
        axis.set_ylabel("nats a token")
        axis.legend()
    figure.savefig(out, dpi=90)


def main() -> None:
    baseline = json.loads(METRICS.read_text())["ngram_loss"]
    draw(Path(sys.argv[1]), records([Path(name) for name in sys.argv[2:]]), baseline)


if __name__ == "__main__":
    main()
