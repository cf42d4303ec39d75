"""Checkpoint names of the three models that load from an EXL3 checkpoint of GLM-5.3-Flash.

One checkpoint holds the vision tower, the language model and, behind its last layer, the MTP block;
each model takes its part and leaves the rest to the others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from glm_exl3.format.metadata import PACKED_LEAVES

LANGUAGE = "model.language_model."
VISION = "model.visual."
_LAYER = re.compile(r"^(?P<stem>(?:model\.)?layers)\.(?P<index>\d+)\.(?P<rest>.+)$")

MTP_OWN = (
    "enorm.weight",
    "hnorm.weight",
    "shared_head.norm.weight",
    *(f"eh_proj.{leaf}" for leaf in ("weight", *PACKED_LEAVES)),
)
MTP_SHARED = (
    "embed_tokens.weight",
    *(f"shared_head.head.{leaf}" for leaf in ("weight", *PACKED_LEAVES)),
)
"""Tensors of the MTP block that the target's own take the place of."""


@dataclass(frozen=True)
class PrefixMapper:
    """Renames one prefix; the `NameMapper` of models whose class brings none."""

    old: str
    new: str

    def map_name(self, key: str) -> str | None:
        return self.new + key.removeprefix(self.old) if key.startswith(self.old) else None


@dataclass(frozen=True)
class DraftMapper:
    """Drafter checkpoints count layers from 0 and have no `model.`; vLLM counts on from the
    target."""

    first_layer: int

    def map_name(self, key: str) -> str | None:
        match = _LAYER.match(key)
        if match:
            return f"model.layers.{int(match['index']) + self.first_layer}.{match['rest']}"
        return key if key.startswith("lm_head") else f"model.{key}"


def layer_index(name: str) -> int | None:
    """Index of the decoder layer a text-model tensor belongs to, or None."""
    match = _LAYER.match(name.replace(LANGUAGE, "model.", 1))
    return int(match["index"]) if match else None


def is_mtp(name: str, hidden_layers: int) -> bool:
    """Whether a tensor belongs to the MTP block, which sits behind the last hidden layer."""
    index = layer_index(name)
    return index is not None and index >= hidden_layers


def text_name(name: str) -> str:
    """A tensor name as the flat text model has it."""
    return "model." + name.removeprefix(LANGUAGE) if name.startswith(LANGUAGE) else name


def composite_name(name: str) -> str:
    """A tensor name as the composite model (vision tower and language model) has it."""
    if name.startswith(LANGUAGE):
        return "language_model.model." + name.removeprefix(LANGUAGE)
    if name.startswith(VISION):
        return "visual." + name.removeprefix(VISION)
    return f"language_model.{name}" if name.startswith("lm_head.") else name


def mtp_sibling(name: str, sibling: int | None) -> str | None:
    """The tensor that a hidden layer of the same kind has in place of one of the MTP block.

    None for what only the MTP block has. `sibling` is the index of such a layer; without one
    nothing can be compared.
    """
    match = _LAYER.match(text_name(name))
    assert match is not None
    if match["rest"] in (*MTP_OWN, *MTP_SHARED) or sibling is None:
        return None
    return f"model.layers.{sibling}.{match['rest']}"


def like_mtp(text_config: Any) -> int | None:
    """Index of the last hidden layer built like the MTP block: MLA with routed experts."""
    kinds = zip(text_config.layer_types, text_config.mlp_layer_types, strict=False)
    found = [i for i, (a, m) in enumerate(kinds) if a != "linear_attention" and m == "sparse"]
    return found[-1] if found else None


def tower_modules(vision_config: Any) -> frozenset[str]:
    """Checkpoint modules of the vision tower, from transformers' own model, without memory."""
    import torch
    from transformers import AutoModel

    with torch.device("meta"):
        tower = AutoModel.from_config(vision_config)
    return frozenset(f"{VISION}{name.rpartition('.')[0]}" for name in tower.state_dict())


def mtp_name(name: str, hidden_layers: int) -> str | None:
    """A tensor name as the MTP model has it, or None when the MTP model does not take it."""
    if not is_mtp(name, hidden_layers):
        return None
    match = _LAYER.match(text_name(name))
    assert match is not None
    rest = match["rest"]
    if rest in MTP_SHARED:
        return None
    block = "" if rest in MTP_OWN else "mtp_block."
    return f"model.layers.{match['index']}.{block}{rest}"


def draft_name(name: str) -> str | None:
    """A tensor name as the DFlash2 drafter has it."""
    if "t2d" in name:
        return None
    if "d2t" in name:
        return name.replace("d2t", "draft_id_to_target_id")
    return name if "lm_head" in name else f"model.{name}"
