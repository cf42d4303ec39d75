"""Write a checkpoint folder: shards with an index, configs, tokenizer.

What: `write_folder` is the only place that touches the disk. Why several shards although the model
is small: loaders must follow the index, and bad-input tests need a shard to lose.

What must stay true: the same tensors give the same bytes (names sorted, shard cuts by size, JSON
with sorted keys), and a folder is complete before its config.json exists, so that a reader never
takes a half-written folder for a checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from glm_exl3.ref.tiny.configs import generation_config, tensor_storage
from glm_exl3.ref.tiny.tokenizer import TEMPLATE_FILE, TOKENIZER_FILE, tokenizer_config

SHARD_BYTES = 4 << 20
INDEX = "model.safetensors.index.json"


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def shards(tensors: Mapping[str, Tensor], limit_bytes: int) -> Iterator[dict[str, Tensor]]:
    """`tensors` by name in groups of about `limit_bytes`; every group has at least one tensor."""
    group: dict[str, Tensor] = {}
    filled = 0
    for name in sorted(tensors):
        size = _size(tensors[name])
        if group and filled + size > limit_bytes:
            yield group
            group, filled = {}, 0
        group[name] = tensors[name]
        filled += size
    if group:
        yield group


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """JSON with sorted keys and a final newline."""
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_shards(folder: Path, tensors: Mapping[str, Tensor], limit_bytes: int) -> None:
    """The safetensors files and their index."""
    from safetensors.torch import save_file

    groups = list(shards(tensors, limit_bytes))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(group, name)
    total = sum(_size(tensor) for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, its config and the chat template."""
    shutil.copyfile(TOKENIZER_FILE, folder / TOKENIZER_FILE.name)
    shutil.copyfile(TEMPLATE_FILE, folder / TEMPLATE_FILE.name)
    write_json(folder / "tokenizer_config.json", tokenizer_config())


def write_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    extra: Mapping[str, Mapping[str, Any]] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A complete checkpoint folder, replacing one of an earlier run.

    `config` becomes config.json; when it has a `quantization_config`, quantization_config.json
    repeats that with the stored tensors of every module. `extra` are further JSON files by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.json"), *folder.glob("*.jinja")]:
        old.unlink()
    write_shards(folder, tensors, shard_bytes)
    write_tokenizer(folder)
    write_json(folder / "generation_config.json", generation_config())
    for name, document in (extra or {}).items():
        write_json(folder / name, document)
    quantization = config.get("quantization_config")
    if quantization is not None:
        storage = {"tensor_storage": tensor_storage(tensors)}
        write_json(folder / "quantization_config.json", quantization | storage)
    write_json(folder / "config.json", config)
