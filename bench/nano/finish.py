"""From a trained target to measured EXL3 variants: Hessians, packing, KL.

`python -m nano.finish --resume DIR --scratch FILE --out DIR` quantises the target of `DIR` by every
recipe with and without Hessians and measures each against the BF16 model on held-out text. Writes
one `RECIPE.safetensors` with the packed tensors each, and `figures.json`. `nano.folders` makes the
checkpoint folders from these.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from glm_exl3.ref.encode import encode_tiles
from glm_exl3.ref.quantize import Encoder
from glm_exl3.ref.tiny.twin import decode_modules, split_kda
from nano import data, viterbi
from nano.calibration import Hessians, collect
from nano.checkpoint import fill, load_shards
from nano.evaluate import SPARSE, held_out_windows, logits_of, mean_loss, needle_share
from nano.export import stored
from nano.geometry import nano_geometry
from nano.model import Nano, Predictor, in_evaluation
from nano.packing import RECIPES, Packed, pack, packed_checkpoint

CALIBRATION_BATCHES = 8


def calibration_batches(streams: data.Streams) -> list[Tensor]:
    """Training rows `[16, 2048]`, the same for every use on one kind of device."""
    generator = torch.Generator(streams.documents.tokens.device).manual_seed(8)
    return [
        data.batch(streams, (12, 4, 0), 2048, generator).tokens[:, :-1]
        for _ in range(CALIBRATION_BATCHES)
    ]


def trained(
    run: Path, scratch: Path, device: torch.device
) -> tuple[tuple[Nano, Predictor], dict[str, Tensor], data.Streams, Hessians]:
    """What packing starts from: a run's models, their stored tensors, its streams, Hessians."""
    models = in_evaluation(nano_geometry().text, device)
    shards = load_shards(run, "target-")
    tensors = {name: stored(name, tensor) for name, tensor in shards.items()}
    fill(tensors, *models)
    streams = data.loaded(scratch, device)
    torch.set_float32_matmul_precision("high")
    hessians = collect(*models, calibration_batches(streams))
    torch.set_float32_matmul_precision("highest")
    return models, tensors, streams, hessians


def divergence(reference: Nano, other: Nano, windows: Tensor) -> Tensor:
    """Mean KL(reference || other) in nats per token of each window, `[N]`, for `[N, T + 1]`."""
    parts = []
    for window in windows.split(4):
        first = logits_of(reference, window[:, :-1], SPARSE).float().log_softmax(-1)
        second = logits_of(other, window[:, :-1], SPARSE).float().log_softmax(-1)
        parts.append((first.exp() * (first - second)).sum(-1).mean(-1))
    return torch.cat(parts)


def unpacked(tensors: dict[str, Tensor], packed: Packed, name: str) -> dict[str, Tensor]:
    """The checkpoint a reader of the packed one computes with, under the unpacked names.

    Decoded where `tensors` are.
    """
    device = next(iter(tensors.values())).device
    complete = packed_checkpoint(tensors, packed, RECIPES[name])
    moved = {name: tensor.to(device) for name, tensor in complete.items()}
    return split_kda(decode_modules(moved, torch.float32))


@torch.no_grad()
def measured(
    reference: Nano, other: tuple[Nano, Predictor], streams: data.Streams, windows: Tensor
) -> dict[str, Any]:
    """Figures of one variant."""
    each = divergence(reference, other[0], windows)
    return {
        "kl": each.mean().item(),
        "kl_by_window": [round(value, 6) for value in each.tolist()],
        "loss": mean_loss(other[0], windows, SPARSE),
        "needle": needle_share(other[0], streams.held_out_needles, SPARSE),
    }


@dataclass(frozen=True)
class Workshop:
    """What packing and measuring a variant needs."""

    models: tuple[Nano, Predictor]
    tensors: dict[str, Tensor]
    streams: data.Streams
    encoder: Encoder
    out: Path
    figures: dict[str, Any] = field(default_factory=dict)

    def variants(self, hessians: Hessians | None) -> None:
        """Pack and measure every recipe; those with Hessians are written."""
        device = next(self.models[0].parameters()).device
        other = in_evaluation(nano_geometry().text, device)
        windows = held_out_windows(self.streams.held_out, 2048, 48)
        moved = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        for name, recipe in RECIPES.items():
            begin = time.monotonic()
            packed = pack(moved, recipe, hessians, self.encoder)
            fill(unpacked(moved, packed, name), *other)
            found = measured(self.models[0], other, self.streams, windows)
            found["bits"] = bits_per_weight(packed)
            label = name if hessians is not None else f"{name} without Hessian"
            self.figures[label] = found
            brief = {key: value for key, value in found.items() if key != "kl_by_window"}
            print(label, brief, f"{time.monotonic() - begin:.0f} s", flush=True)
            if hessians is not None:
                save_file(packed.tensors, self.out / f"{name}.safetensors", {"format": "pt"})
            (self.out / "figures.json").write_text(json.dumps(self.figures, indent=1) + "\n")


def bits_per_weight(packed: Packed) -> float:
    """Average bits of the packed weights, scales not counted."""
    trellises = [t for name, t in packed.tensors.items() if name.endswith(".trellis")]
    weights = sum(256 * t.shape[0] * t.shape[1] for t in trellises)
    return sum(16 * t.numel() for t in trellises) / weights


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name in ("resume", "out", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    given = parse()
    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.out.mkdir(parents=True, exist_ok=True)
    encoder: Encoder = viterbi.encode
    try:
        viterbi.check(device)
    except Exception as error:
        print(f"encoding with the reference: {error}", flush=True)
        encoder = encode_tiles
    print(f"encoder checked after {time.monotonic() - begin:.0f} s", flush=True)
    models, tensors, streams, hessians = trained(given.resume, given.scratch, device)
    workshop = Workshop(models, tensors, streams, encoder, given.out)
    workshop.variants(hessians)
    workshop.variants(None)
    print(f"done after {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
