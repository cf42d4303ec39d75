"""What the dense recode costs the trained miniature: KL from its BF16 dense part.

    python -m nano.recode MODEL/tr3 RESULT.json --schemes fp8,fp8-scaled,int8 [--texts 8]

The target of the packed folder is decoded once; per scheme its dense projections take the values
that the codes mean, and the held-out texts of the panel (tests/bench/nano_panel.json) are scored
with the training modules in fp32. `fp8-scaled` quantises the activations of these projections per
token, too, as the tensor cores' product does. `exl3:K` encodes, which takes long on a CPU, or reads
`--cache FOLDER`: matrices that `python -m glm_exl3.recode` made, which goes on after a stop. A
merged layer is recoded as a whole by 8-bit schemes, as in the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from glm_exl3 import envs
from glm_exl3.format.layout import Codebook
from glm_exl3.format.recode import GROUPS, Recode, dense_modules, encodable
from glm_exl3.format.recode_cache import CODEBOOK, check_complete, units
from glm_exl3.quant.facts import read_facts
from glm_exl3.quant.names import MERGED
from glm_exl3.quant.recode_cache import folder_for, sources
from glm_exl3.ref import recode
from glm_exl3.ref.datafree import quantize_datafree
from glm_exl3.ref.decode import dequantize
from glm_exl3.ref.encode_host import encode_tiles_on_host
from nano import viterbi
from nano.checkpoint import fill
from nano.finish import divergence
from nano.geometry import nano_geometry
from nano.model import Nano, Predictor
from nano.restore import decoded_target

PANEL = Path(__file__).parents[2] / "tests" / "bench" / "nano_panel.json"
PREFIX = "model.language_model."


def merged_with(module: str) -> Iterable[str]:
    """The module and those that vLLM keeps in one layer with it."""
    parent, _, leaf = module.rpartition(".")
    parts = next((parts for parts in MERGED.values() if leaf in parts), (leaf,))
    if leaf in ("q_proj", "k_proj", "v_proj"):
        parts = MERGED["in_proj_qkvbfg_a"]
    return [f"{parent}.{part}" if parent else part for part in parts]


def by_rows(tensors: dict[str, Tensor], modules: Iterable[str], scheme: str) -> dict[str, Tensor]:
    """8-bit rows of every module and of what is merged with it, decoded."""
    names = {name for module in modules for name in merged_with(module)}
    found = {}
    for name in names:
        weight = tensors.get(f"{name}.weight")
        if weight is not None:
            found[f"{name}.weight"] = recode.dequantize_rows(*recode.quantize_rows(weight, scheme))
    return found


def by_trellis(tensors: dict[str, Tensor], modules: Iterable[str], bits: int) -> dict[str, Tensor]:
    """EXL3 at K bits, decoded; modules with one input share their scales."""
    found: dict[str, Tensor] = {}
    codebook = Codebook(CODEBOOK)
    for unit in units(m for m in modules if encodable(*tensors[f"{m}.weight"].shape)):
        weights = [tensors[f"{module}.weight"].t() for module in unit]
        joined = torch.cat(weights, 1)
        encoder = viterbi.encode if joined.is_cuda else encode_tiles_on_host
        packed = quantize_datafree(joined, bits, codebook, encoder=encoder)
        whole = dequantize(packed.trellis, packed.suh, packed.svh, codebook).t()
        parts = whole.split([weight.shape[1] for weight in weights])
        found |= {f"{m}.weight": part for m, part in zip(unit, parts, strict=True)}
    return found


def from_cache(folder: Path, root: Path, bits: int) -> dict[str, Tensor]:
    """The matrices of a complete cache below `root`, decoded. Raises GlmExl3Error without one."""
    os.environ[envs.DENSE_CACHE.name] = str(root)
    facts, asked = read_facts(folder), Recode("exl3", GROUPS, bits)
    place = folder_for(facts, asked)
    found: dict[str, Tensor] = {}
    for unit in check_complete(place, units(sources(facts, asked)), asked):
        parts = load_file(place / unit.file)
        for module in unit.modules:
            trellis, suh, svh = (parts[f"{module}.{leaf}"] for leaf in ("trellis", "suh", "svh"))
            found[f"{module}.weight"] = dequantize(trellis, suh, svh, Codebook(CODEBOOK)).t()
    return found


def quantise_inputs(model: Nano, modules: Iterable[str]) -> list[Any]:
    """Hooks that quantise the inputs of these linear layers per token."""
    names = {module.removeprefix(PREFIX) for module in modules}

    def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        flat = inputs[0].reshape(-1, inputs[0].shape[-1])
        values = recode.dequantize_rows(*recode.quantize_rows(flat, "fp8"))
        return (values.reshape(inputs[0].shape).to(inputs[0].dtype), *inputs[1:])

    return [
        module.register_forward_pre_hook(hook)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name in names
    ]


@torch.no_grad()
def measure(
    folder: Path,
    schemes: list[str],
    texts: Tensor,
    save: Callable[[Any], None],
    cache: Path | None = None,
) -> None:
    """KL and relative weight error per scheme; `save` gets the rows so far."""
    device = texts.device
    tensors = {name: value.to(device) for name, value in decoded_target(folder, device).items()}
    dense = dense_modules(((n, tuple(v.shape)) for n, v in tensors.items()), GROUPS)
    modules = list(dense)
    text = nano_geometry().text
    reference, predictor = Nano(text).to(device).eval(), Predictor(text).to(device)
    fill(tensors, reference, predictor)
    rows = []
    for scheme in schemes:
        begin = time.monotonic()
        kind, _, bits = scheme.partition(":")
        if kind == "exl3" and cache:
            made = from_cache(folder, cache, int(bits))
            changed = {name: value.to(device) for name, value in made.items()}
        elif kind == "exl3":
            changed = by_trellis(tensors, modules, int(bits))
        else:
            changed = by_rows(tensors, modules, kind.removesuffix("-scaled"))
        other = Nano(text).to(device).eval()
        fill(tensors | changed, other, Predictor(text).to(device))
        hooks = quantise_inputs(other, modules) if kind.endswith("-scaled") else []
        each = divergence(reference, other, texts)
        for hook in hooks:
            hook.remove()
        error = sum(float((v - tensors[n]).square().sum()) for n, v in changed.items())
        power = sum(float(tensors[n].float().square().sum()) for n in changed)
        rows.append(
            {
                "scheme": scheme,
                "kl": round(each.mean().item(), 6),
                "kl_by_text": [round(x, 6) for x in each.tolist()],
                "weight_error": round((error / power) ** 0.5, 5),
                "matrices": len(changed),
                "hooks": len(hooks),
                "positions": texts[:, 1:].numel(),
                "seconds": round(time.monotonic() - begin, 1),
            }
        )
        print({k: v for k, v in rows[-1].items() if k != "kl_by_text"}, flush=True)
        save(rows)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m nano.recode")
    made.add_argument("model", type=Path)
    made.add_argument("result", type=Path)
    made.add_argument("--schemes", default="fp8,fp8-scaled,int8")
    made.add_argument("--texts", type=int, default=16)
    made.add_argument("--tokens", type=int, default=511)
    made.add_argument("--cache", type=Path, help="folder of matrices recoded to exl3")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, measure, write after every scheme."""
    options = parser().parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    panel = json.loads(PANEL.read_text())["texts"][: options.texts]
    texts = torch.tensor([text[: options.tokens + 1] for text in panel], device=device)
    measure(
        options.model,
        options.schemes.split(","),
        texts,
        lambda rows: options.result.write_text(json.dumps(rows, indent=1) + "\n"),
        options.cache,
    )


if __name__ == "__main__":
    main()
