"""Load time that the edit `ablit` adds at the real dims, and a vector to time steering with.

    python -m e2e.edits_load WORK --out RESULT.json [--ranks 1 2] [--layers 15-45] [--budget-s 170]

WORK gets a made-up donor of the output projections of the layers (2.7 GB for 15-45), a made-up
direction, and `vector.gguf`: random directions for layers 1 to 44. For each number of ranks and
each method the edit is applied to the matrices of every rank in turn, on the GPU if there is one;
the seconds are those of the slowest rank, with reading and hashing of the donor from the page
cache. The matrices are the donor's with noise, so no check of the edit is off.
The limit is 20 s for all layers. The result is written after every figure, nothing new starts
behind the budget, and a line per figure says how it stands to the limit; exit status 1 unless all
are within it and the vector is there. Only the vector needs the package gguf. Steering is timed
by `e2e.inside` with and without

    GLM_EXL3_STEER_VECTOR=WORK/vector.gguf GLM_EXL3_STEER_ALPHA=2
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 20.0
NOISE = 0.05


@dataclass(frozen=True)
class Matrix:
    """An output projection: its layer and (out, in)."""

    layer: int
    shape: tuple[int, int]


def matrices(layers: Sequence[int]) -> list[Matrix]:
    """The output projections of the layers; the MTP block behind the last one is MLA."""
    from glm_exl3.dummy.geometry import real_geometry

    text = real_geometry().text
    found = []
    for layer in layers:
        linear = layer < text.num_hidden_layers and text.is_linear(layer)
        width = text.linear_width if linear else text.num_attention_heads * text.v_head_dim
        found.append(Matrix(layer, (text.hidden_size, width)))
    return found


def make_donor(folder: Path, wanted: Sequence[Matrix]) -> None:
    """A complete donor with random values; kept if it is there."""
    import torch
    from safetensors.torch import save_file

    from glm_exl3.format.donor import RECORD, Donor, DonorTensor

    known = Donor.load(folder)
    if known is not None and known.layers == tuple(one.layer for one in wanted):
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = []
    device = _device()
    for one in wanted:
        size = 2 * one.shape[0] * one.shape[1]
        name = f"model.language_model.layers.{one.layer}.self_attn.o_proj.weight"
        tensor = DonorTensor(one.layer, name, "BF16", one.shape, "made-up", "made-up", 0, size)
        generator = torch.Generator(device).manual_seed(one.layer)
        values = torch.randn(one.shape, generator=generator, device=device) * one.shape[1] ** -0.5
        kept = values.bfloat16().cpu()
        save_file({name: kept}, folder / tensor.stored)
        data = kept.view(torch.uint8).numpy()
        tensors.append((tensor, hashlib.sha256(data).hexdigest()))
    donor = Donor("made/up", "0" * 40, {}, tuple(tensor for tensor, _ in tensors))
    for tensor, sha256 in tensors:
        donor = donor.with_hash(tensor.layer, sha256)
    (folder / RECORD).write_text(json.dumps(donor.as_json()))


def make_direction(path: Path, hidden: int) -> None:
    import torch
    from safetensors.torch import save_file

    direction = torch.randn(hidden, generator=torch.Generator().manual_seed(0))
    save_file({"direction": direction}, path)


def make_vector(path: Path, layers: int = 44, width: int = 4 * 4096) -> None:
    """Random unit directions for layers 1 to `layers`."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("glp.mode", "project")
    writer.add_string("glp.hook_point", "residual_stream_post_layer")
    for layer in range(1, layers + 1):
        values = np.random.default_rng(layer).normal(size=width)
        unit = values / np.linalg.norm(values)
        writer.add_tensor(f"direction.{layer}", unit.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def edit_seconds(method: Any, wanted: Sequence[Matrix], rank: int, ranks: int, donor: Any) -> float:
    """Seconds of one rank's edits; the matrices are made outside the clock."""
    import torch

    from glm_exl3.format.sharding import Cut
    from glm_exl3.quant.ablit import Ablit
    from glm_exl3.quant.edits import Placement

    device = _device()
    edit = Ablit(method, tuple(one.layer for one in wanted))
    spent = 0.0
    for one in wanted:
        width = one.shape[1] // ranks
        placement = Placement(
            Cut(0, one.shape[0], one.shape[0]), Cut(rank * width, (rank + 1) * width, width)
        )
        empty = torch.empty(one.shape[0], width, dtype=torch.bfloat16, device=device)
        same = donor.result(one.layer, one.shape, empty, placement).float()
        shard = (same + NOISE * same.std() * torch.randn_like(same)).bfloat16()
        module = f"model.layers.{one.layer}.self_attn.o_proj"
        _synchronise(device)
        begin = time.perf_counter()
        changed = edit.edit(module, one.shape, shard, placement)
        assert changed is not None
        shard.copy_(changed)
        _synchronise(device)
        spent += time.perf_counter() - begin
    return spent


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _synchronise(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    work: Path,
    layers: Sequence[int],
    ranks: Sequence[int],
    save: Callable[[dict[str, Any]], object],
    budget_s: float,
) -> dict[str, Any]:
    """Seconds by method and number of ranks; `save` gets the result after each."""
    import torch

    from glm_exl3.quant.ablit import Projection, Transplant

    begin, wanted = time.monotonic(), matrices(layers)
    make_donor(work / "donor", wanted)
    make_direction(work / "direction.safetensors", wanted[0].shape[0])
    donor = Transplant.open(work / "donor")
    methods = {"transplant": donor, "proj": Projection.open(work / "direction.safetensors", 1.0)}
    seconds: dict[str, float] = {}
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "layers": len(wanted),
        "bytes": sum(2 * one.shape[0] * one.shape[1] for one in wanted),
        "seconds": seconds,
        "limit_s": LIMIT_S,
        "left_out": [],
    }
    for name, count in ((name, count) for name in methods for count in ranks):
        if time.monotonic() - begin > budget_s:
            result["left_out"].append(f"{name}_{count}")
            continue
        each = [edit_seconds(methods[name], wanted, r, count, donor) for r in range(count)]
        seconds[f"{name}_{count}"] = round(max(each), 3)
        save(result)
    result["within"] = not result["left_out"] and max(seconds.values()) <= LIMIT_S
    save(result)
    return result


def lines(result: dict[str, Any]) -> list[str]:
    """What every figure is, and how it stands to the limit."""
    rest = f"at most {LIMIT_S:g} s for {result['layers']} layers on {result['device']}"
    found = [
        f"edits: {name} {value:.3f} s: {'ok' if value <= LIMIT_S else 'MISSED'}, {rest}"
        for name, value in result["seconds"].items()
    ]
    return [*found, *(f"edits: {name}: NOT MEASURED, {rest}" for name in result["left_out"])]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    from glm_exl3.format.donor import parse_layers

    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("work", type=Path)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--layers", type=parse_layers, default=parse_layers("15-45"))
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    made.add_argument("--budget-s", type=float, default=170.0)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is missing in WORK and measure; 1 unless everything is within the limit."""
    options = parser().parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    vector = options.work / "vector.gguf"
    try:
        make_vector(vector)
    except ModuleNotFoundError as error:
        print(f"edits: no vector.gguf to time steering with: {error}", flush=True)
    result = measure(
        options.work,
        options.layers,
        options.ranks,
        lambda found: options.out.write_text(json.dumps(found, indent=1)),
        options.budget_s,
    )
    print("\n".join(lines(result)))
    return 0 if result["within"] and vector.exists() else 1


if __name__ == "__main__":
    sys.exit(main())
