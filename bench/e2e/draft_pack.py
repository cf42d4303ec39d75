"""How long packing a drafter of the real dims takes on this GPU, and how large the result is.

    python -m e2e.draft_pack WORK --out RESULT.json [--layers 5]

Writes a BF16 drafter of random weights to WORK/bf16 (its dims are those of `glm_exl3.dummy`, five
layers are 2.3 GB), packs it into WORK/packed with what is behind the product's own command, and
times that. The packed folder stays, for `e2e.draft_time`. The figures are seconds from folder to
folder, digests of the source and the final sync included, and bytes of the packed weights. A line
with its second follows every matrix; `first_s` and `last_s` are the seconds before the first and
behind the last one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

LIMIT_S, LIMIT_GIB = 300.0, 1.0


def write_random(folder: Path, layers: int, target_layers: int) -> None:
    """A BF16 drafter folder with random weights of unit gain and unit norms."""
    import torch
    from safetensors.torch import save_file

    from glm_exl3.dummy.folder import draft_headers, write_drafter
    from glm_exl3.dummy.geometry import real_geometry
    from glm_exl3.format.metadata import SINGLE_FILE
    from glm_exl3.ref.tiny.recipe import DRAFT_BF16

    whole = real_geometry(target_layers)
    geometry = replace(whole, draft=replace(whole.draft, num_hidden_layers=layers))
    write_drafter(folder, geometry, packed=False)
    text = geometry.text
    headers = draft_headers(DRAFT_BF16, geometry.draft, text.hidden_size, text.vocab_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, header in headers.items():
        made = torch.randn(header.shape, generator=generator, device=device)
        gain = 1.0 if header.dim() < 2 else header.shape[-1] ** -0.5
        made = 1 + 0.1 * made if header.dim() == 1 else made * gain
        tensors[name] = made.to(torch.bfloat16).cpu()
    save_file(tensors, folder / SINGLE_FILE, {"format": "pt"})


def measure(work: Path, layers: int, target_layers: int) -> dict[str, Any]:
    """Seconds and GiB. Raises what packing raises."""
    import torch

    from glm_exl3.drafter.pack import Options, pack

    source, packed = work / "bf16", work / "packed"
    begin = time.perf_counter()
    if not (source / "config.json").exists():
        write_random(source, layers, target_layers)
    print(f"{time.perf_counter() - begin:6.1f} s  the source is there", flush=True)
    for folder in (packed, packed.with_name("packed.partial")):
        shutil.rmtree(folder, ignore_errors=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin, at = time.perf_counter(), list[float]()

    def told(job: Any, error: float) -> None:
        at.append(time.perf_counter() - begin)
        print(f"{at[-1]:6.1f} s  {job.modules[0]}: error {error:.4f}", flush=True)

    pack(source, packed, Options(), device=device, progress=told)
    seconds = time.perf_counter() - begin
    print(f"{seconds:6.1f} s  the folder is whole", flush=True)
    size = sum(path.stat().st_size for path in packed.glob("*.safetensors"))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {
        "pack_s": round(seconds, 1),
        "first_s": round(at[0], 1),
        "last_s": round(seconds - at[-1], 1),
        "pack_gib": round(size / 2**30, 3),
        "layers": layers,
        "device": name,
        "met": seconds <= LIMIT_S and size <= LIMIT_GIB * 2**30,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure once; 1 when a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m e2e.draft_pack")
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--target-layers", type=int, default=8, help="layers its taps belong to")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    result = measure(options.work, options.layers, options.target_layers)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"packed in {result['pack_s']} s, {result['pack_gib']} GiB on {result['device']}")
    return int(not result["met"])


if __name__ == "__main__":
    sys.exit(main())
