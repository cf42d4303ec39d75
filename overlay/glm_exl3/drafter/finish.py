"""The finished folder: weights, configuration, everything else of the source, and a model card.

It is put together beside its final name, checked like any checkpoint, made durable and renamed in
one step. The card carries the source's licence on: who converts a drafter may not pass it on unless
that licence says so.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from glm_exl3.format.durable import sync
from glm_exl3.format.headers import read_object
from glm_exl3.format.layout import TILE
from glm_exl3.format.metadata import SINGLE_FILE, check_checkpoint
from glm_exl3.ref.tiny.configs import EXL3_VERSION, tensor_storage

CARD = "README.md"
_MADE = ("config.json", "quantization_config.json", "model.safetensors.index.json", CARD)
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".tmp")
_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_LICENCE = re.compile(r"^(license(?:_name|_link)?):\s*(.+)$", re.MULTILINE)


def quantization(tensors: Mapping[str, torch.Tensor], bits: int, codebook: str) -> dict[str, Any]:
    """`quantization_config`: informative, readers look at the tensors."""
    return {
        "quant_method": "exl3",
        "version": EXL3_VERSION,
        "bits": float(bits),
        "head_bits": 16,
        "codebook": codebook,
        "out_scales": "always",
        "calibration": {"rows": 0, "cols": 0},
        "packed_weights": sum(
            TILE * TILE * one.shape[0] * one.shape[1]
            for name, one in tensors.items()
            if name.endswith(".trellis")
        ),
    }


def licence_of(folder: Path) -> dict[str, str]:
    """`license`, `license_name` and `license_link` of the source's card; empty when it has none."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    front = _FRONT.match(text)
    return dict(_LICENCE.findall(front[1])) if front else {}


def notice(licence: Mapping[str, str]) -> str:
    """What the licence of the source means for the converted weights."""
    named = licence.get("license_name") or licence.get("license", "")
    if not named:
        return (
            "The source states no licence. Without one nobody may pass these weights on: keep them "
            "on your own machines."
        )
    text = (
        f"These weights are a conversion of the source and stay under its licence, {named}. The "
        "conversion gives no right that the licence does not give."
    )
    if "nd" in re.split(r"[-_ ]", named.lower()):
        text += (
            " It forbids passing modified versions on (no derivatives): do not upload or share "
            "this folder."
        )
    elif "nc" in re.split(r"[-_ ]", named.lower()):
        text += " It forbids commercial use."
    return text


def card(source: Path, bits: int) -> str:
    """The model card, with the source's own behind it."""
    licence = licence_of(source)
    front = [*(f"{key}: {value}" for key, value in licence.items())]
    front += [f"base_model: {source.name}", "base_model_relation: quantized"]
    original = ""
    if (source / CARD).is_file():
        text = (source / CARD).read_text(encoding="utf-8", errors="replace")
        original = f"\n## Card of the source\n\n{_FRONT.sub('', text).strip()}\n"
    return (
        "---\n" + "\n".join(front) + "\n---\n\n"
        f"# {source.name}, packed as EXL3 at {bits} bits\n\n"
        "Query, output, MLP, `fc` and convolution-kernel projections are packed; key and value "
        "projections and all other tensors are those of the source, byte for byte.\n\n"
        f"## Licence\n\n{notice(licence)}\n{original}"
    )


def make_folder(
    folder: Path, source: Path, tensors: Mapping[str, torch.Tensor], bits: int, codebook: str
) -> None:
    """Write and check a complete drafter in `folder`, replacing what an earlier run left there.

    Raises FormatError when what was written is no legal checkpoint.
    """
    from safetensors.torch import save_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / CARD).write_text(card(source, bits), encoding="utf-8")
    for path in sorted(source.iterdir()):
        made = path.name in _MADE or path.name.endswith(_WEIGHTS) or path.name.startswith(".")
        if path.is_file() and not made:
            shutil.copyfile(path, folder / path.name)
    save_file(dict(tensors), folder / SINGLE_FILE, {"format": "pt"})
    (folder / SINGLE_FILE).chmod((folder / CARD).stat().st_mode)
    settings = quantization(tensors, bits, codebook)
    _write_json(
        folder / "quantization_config.json",
        settings | {"tensor_storage": tensor_storage(tensors)},
    )
    config = read_object(source / "config.json")
    _write_json(folder / "config.json", config | {"quantization_config": settings})
    check_checkpoint(folder)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def publish(folder: Path, out: Path) -> None:
    """Give a complete folder its final name, durably."""
    for path in folder.iterdir():
        sync(path)
    sync(folder)
    folder.rename(out)
    sync(out.parent)
