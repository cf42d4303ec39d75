"""Training shards from a packed folder: `python -m nano.restore MODEL/tr3 MODEL/drafter OUT`.

The BF16 shards of a run are a build product. Where they are gone, training goes on from the packed
weights that were published, decoded: `tr3` packs the routed experts at four bits and keeps the rest
in BF16, which costs little and is made up for within a few steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from glm_exl3.ref.tiny.twin import decode_modules, read_tensors, split_kda
from nano.checkpoint import sharded
from nano.export import PREFIX

_OWN = (PREFIX, "lm_head.")


def decoded_target(folder: Path, device: torch.device | None = None) -> dict[str, Tensor]:
    """The language model's tensors of a packed folder, unpacked, under the training names.

    Decoded, and left, on `device` (the CPU unless given).
    """
    stored = {name: tensor.to(device or "cpu") for name, tensor in read_tensors(folder).items()}
    tensors = split_kda(decode_modules(stored, torch.bfloat16))
    return {name: tensor for name, tensor in tensors.items() if name.startswith(_OWN)}


def restore(packed: Path, drafter: Path, out: Path) -> None:
    """Write the shards that `nano.checkpoint.load_training` reads."""
    out.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(sharded(decoded_target(packed))):
        save_file(shard, out / f"target-{number}.safetensors", {"format": "pt"})
    save_file(read_tensors(drafter), out / "drafter.safetensors", {"format": "pt"})


def main() -> None:
    packed, drafter, out = map(Path, sys.argv[1:])
    restore(packed, drafter, out)


if __name__ == "__main__":
    main()
