"""Shards of a training run: BF16/FP32 checkpoint tensors in files small enough to carry.

The tensors are the source-native checkpoint itself (`nano.export`), so a shard folder is both what
training resumes from and what quantising starts from.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nano.export import checkpoint_tensors, stored

SHARD_BYTES = 15_000_000


def sharded(tensors: dict[str, Tensor], limit: int = SHARD_BYTES) -> list[dict[str, Tensor]]:
    """Split tensors, in name order, into groups of at most `limit` bytes."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name in sorted(tensors):
        size = tensors[name].numel() * tensors[name].element_size()
        if shards[-1] and used + size > limit:
            shards.append({})
            used = 0
        shards[-1][name] = tensors[name]
        used += size
    return shards


def save_whole(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file so that it is never seen half written."""
    partial = file.with_suffix(".tmp")
    save_file(tensors, partial, {"format": "pt"})
    partial.replace(file)


def save_training(
    folder: Path, target: nn.Module, predictor: nn.Module, drafter: nn.Module | None
) -> None:
    """Write `target-N.safetensors` and, if given, `drafter.safetensors`, each replaced whole."""
    tensors = checkpoint_tensors(target, predictor, len(target.layers))
    for number, shard in enumerate(sharded(tensors)):
        save_whole(folder / f"target-{number}.safetensors", shard)
    if drafter is not None:
        save_drafter(folder, drafter)


def save_drafter(folder: Path, drafter: nn.Module) -> None:
    """Write `drafter.safetensors`, replaced whole."""
    tensors = {name: stored(name, tensor) for name, tensor in drafter.state_dict().items()}
    save_whole(folder / "drafter.safetensors", tensors)


def load_shards(folder: Path, stem: str) -> dict[str, Tensor]:
    """All tensors of the shards `stem*.safetensors` of a folder."""
    result: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        result |= load_file(path)
    return result


def stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `nano.export.split_experts`."""
    single = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
    found: dict[str, dict[tuple[int, str], Tensor]] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = single.match(name)
        if match:
            found.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            result[name] = tensor
    for stem, parts in found.items():
        count = 1 + max(index for index, _ in parts)
        result[f"{stem}.gate_up_proj"] = torch.stack(
            [torch.cat([parts[index, "gate"], parts[index, "up"]]) for index in range(count)]
        )
        result[f"{stem}.down_proj"] = torch.stack([parts[index, "down"] for index in range(count)])
    return result


def own_names(tensors: dict[str, Tensor], stem: str) -> dict[str, Tensor]:
    """Training-module names of the checkpoint tensors below `stem`."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(stem):
            own = name[len(stem) :].replace("shared_head.norm.", "shared_head_norm.")
            result[re.sub(r"hc_(attn|ffn)_(fn|base|scale)$", r"\1_hc.\2", own)] = tensor
    return result


def fill(tensors: dict[str, Tensor], target: nn.Module, predictor: nn.Module) -> None:
    """Fill the training modules from checkpoint tensors (unpacked names, any float dtype)."""
    stacked = stacked_experts(tensors)
    last = f"model.language_model.layers.{len(target.layers)}."
    own = {name: tensor for name, tensor in stacked.items() if not name.startswith(last)}
    target.load_state_dict(
        {
            **own_names(own, "model.language_model."),
            "lm_head.weight": tensors["lm_head.weight"],
        }
    )
    predictor.load_state_dict(own_names(stacked, last))


def load_training(
    folder: Path, target: nn.Module, predictor: nn.Module, drafter: nn.Module
) -> None:
    """Fill the modules from a shard folder; a missing drafter leaves the drafter as it is."""
    fill(load_shards(folder, "target-"), target, predictor)
    drafted = load_shards(folder, "drafter")
    if drafted:
        drafter.load_state_dict(drafted)
