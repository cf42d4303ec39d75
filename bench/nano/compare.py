"""Our quantiser against ExLlamaV3's converter: equal matrices, bits, codebook and Hessians.

`python -m nano.compare --resume DIR --scratch FILE --wheel FILE --library FILE --out DIR` packs the
target of `DIR` by one recipe with one quantiser and writes the KL from BF16 on held-out text;
`nano.peer.build` makes the library from the wheel.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from glm_exl3.ref.quantize import quantize_group
from nano import viterbi
from nano.checkpoint import fill
from nano.evaluate import held_out_windows
from nano.finish import bits_per_weight, divergence, trained, unpacked
from nano.geometry import nano_geometry
from nano.model import in_evaluation
from nano.packing import RECIPES, Quantiser, pack
from nano.peer.quantiser import PeerQuantiser, load

QUANTISERS = ("ours", "peer", "peer-scaled-hessian")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name in ("resume", "scratch", "wheel", "library", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--recipe", choices=RECIPES, required=True)
    parser.add_argument("--quantiser", choices=QUANTISERS, required=True)
    return parser.parse_args()


def quantiser_named(name: str, wheel: Path, library: Path, folder: Path) -> Quantiser:
    """Ours, or the peer's with its converter's defaults or its option `--scaled_hessian`."""
    if name == "ours":
        return quantize_group
    options = {"scaled_hessian": True} if name == "peer-scaled-hessian" else {}
    return PeerQuantiser(load(wheel, library, folder), **options)


@torch.no_grad()
def main() -> None:
    given = parse()
    begin = time.monotonic()
    device = torch.device("cuda")
    (target, _), tensors, streams, hessians = trained(given.resume, given.scratch, device)
    other = in_evaluation(nano_geometry().text, device)
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        quantiser = quantiser_named(given.quantiser, given.wheel, given.library, Path(folder))
        packed = pack(moved, RECIPES[given.recipe], hessians, viterbi.encode, quantiser)
    fill(unpacked(moved, packed, given.recipe), *other)
    each = divergence(target, other[0], held_out_windows(streams.held_out, 2048, 48))
    found = {
        "recipe": given.recipe,
        "quantiser": given.quantiser,
        "kl": each.mean().item(),
        "bits": bits_per_weight(packed),
        "seconds": round(time.monotonic() - begin, 1),
    }
    print(json.dumps(found), flush=True)
    found["kl_by_window"] = [round(x, 6) for x in each.tolist()]
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"compare-{given.recipe}-{given.quantiser}.json"
    file.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
