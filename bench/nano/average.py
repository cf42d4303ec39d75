"""The weighted average of two stages of training, its share chosen on held-out text.

`python -m nano.average FIRST SECOND STREAMS OUT` writes the shards of (1 - a) FIRST + a SECOND for
the share a of least loss. The windows that choose come after those which the figures are measured
on. Averaging keeps what the second stage learned and drops what it memorised.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from nano import data
from nano.checkpoint import fill, load_shards, save_whole, sharded
from nano.evaluate import SPARSE, held_out_windows, mean_loss, needle_share
from nano.export import stored
from nano.geometry import nano_geometry
from nano.model import in_evaluation

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
LEAST_SHARE = 0.1
MEASURED_WINDOWS = 96


def averaged(
    first: dict[str, Tensor], second: dict[str, Tensor], share: float
) -> dict[str, Tensor]:
    """The average in fp32, stored as checkpoints are."""
    return {
        name: stored(name, tensor.float() * (1 - share) + second[name].float() * share)
        for name, tensor in first.items()
    }


@torch.no_grad()
def main() -> None:
    first_folder, second_folder, scratch, out = map(Path, sys.argv[1:])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    first, second = (load_shards(path, "target-") for path in (first_folder, second_folder))
    target, predictor = in_evaluation(nano_geometry().text, device)
    streams = data.loaded(scratch, device)
    windows = held_out_windows(streams.held_out, 2048, 1 << 20)
    figures = []
    for share in SHARES:
        fill(averaged(first, second, share), target, predictor)
        figures.append(
            {
                "share": share,
                "choosing": mean_loss(target, windows[MEASURED_WINDOWS:], SPARSE),
                "loss": mean_loss(target, windows[:MEASURED_WINDOWS], SPARSE),
                "needle": needle_share(target, streams.held_out_needles, SPARSE),
            }
        )
        print(json.dumps(figures[-1]), flush=True)
    eligible = [figure for figure in figures if figure["share"] >= LEAST_SHARE]
    share = min(eligible, key=lambda figure: figure["choosing"])["share"]
    out.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(sharded(averaged(first, second, share))):
        save_whole(out / f"target-{number}.safetensors", shard)
    record = {"share": share, "candidates": figures}
    (out / "average.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"share {share}", flush=True)


if __name__ == "__main__":
    main()
