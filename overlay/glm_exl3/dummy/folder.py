"""Write a checkpoint folder that has headers and no weights.

What: the tensor names, shapes and dtypes come from the maker of the tiny checkpoints, run on the
`meta` device with other dims; one sparse safetensors file carries the header and the codebook
markers, which are the only bytes anyone reads. Its length is that of the real weights, so a file
system without sparse files refuses it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm_exl3.dummy.geometry import DRAFT_WINDOW
from glm_exl3.format.layout import TILE, Codebook
from glm_exl3.format.metadata import SINGLE_FILE
from glm_exl3.ref.tiny import configs
from glm_exl3.ref.tiny.drafter import KERNEL_SIDES
from glm_exl3.ref.tiny.folder import write_json, write_tokenizer
from glm_exl3.ref.tiny.geometry import DraftGeometry, Geometry
from glm_exl3.ref.tiny.matrices import MatrixMaker, Packed
from glm_exl3.ref.tiny.recipe import (
    DRAFT_BF16,
    DRAFT_EXL3,
    RECIPES,
    Family,
    RandomStreams,
    Recipe,
    Role,
)
from glm_exl3.ref.tiny.target import PREFIX, Gains, add_layer, add_mtp_layer, add_vision

_DTYPES = {
    torch.int16: "I16",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


@dataclass(frozen=True)
class ShapeStreams(RandomStreams):
    """Streams whose values nobody wants: every tensor lives on the `meta` device."""

    def _shape(self, name: str, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device="meta")

    normal = uniform = signs = _shape


@cache
def _packed(rows: int, columns: int, bits: int, codebook: Codebook) -> Packed:
    with torch.device("meta"):
        trellis = torch.empty(rows // TILE, columns // TILE, TILE * bits, dtype=torch.int16)
        suh, svh = (torch.empty(size, dtype=torch.float16) for size in (rows, columns))
    return Packed(trellis, suh, svh, codebook)


class HeaderMaker(MatrixMaker):
    """Adds names and shapes; markers keep their value."""

    def packed(self, module: str, size: tuple[int, int], bits: int, *_: Any, **__: Any) -> Packed:
        return _packed(*size, bits, self.recipe.codebook)

    def input_signs(self, module: str, size: int) -> Tensor:
        return self.streams.signs(module, size)

    def structured(self, module: str, role: Role, weight: Tensor) -> None:
        self.linear(module, role, (weight.shape[1], weight.shape[0]))


def _maker(recipe: Recipe) -> HeaderMaker:
    return HeaderMaker(ShapeStreams(0), recipe)


def target_headers(family: Family, geometry: Geometry) -> dict[str, Tensor]:
    """Names and shapes of the target of a packed family; values on `meta` except markers."""
    maker, text = _maker(RECIPES[family]), geometry.text
    hidden, gains = text.hidden_size, Gains()
    maker.linear("lm_head", Role.HEAD, (hidden, text.vocab_size))
    maker.linear(f"{PREFIX}.embed_tokens", Role.PLAIN, (hidden, text.vocab_size))
    maker.norm(f"{PREFIX}.norm", hidden)
    for layer in range(text.num_hidden_layers):
        add_layer(maker, text, layer, gains)
    for layer in range(text.mtp_layer, text.mtp_layer + text.num_nextn_predict_layers):
        with torch.device("meta"):
            add_mtp_layer(maker, text, layer, gains)
    add_vision(maker, geometry.vision, hidden)
    return maker.tensors


def draft_headers(recipe: Recipe, draft: DraftGeometry, hidden: int, vocab: int) -> dict[str, Any]:
    """Names and shapes of the DFlash2 drafter."""
    maker = _maker(recipe)
    maker.linear("fc", Role.DRAFT, (hidden * len(draft.target_layer_ids), hidden))
    maker.norm("hidden_norm", hidden)
    maker.norm("norm", hidden)
    groups = KERNEL_SIDES * draft.conv_kernel_size * (hidden // draft.conv_group_size)
    for layer in range(draft.num_hidden_layers):
        key = f"layers.{layer}"
        widths = {"q": draft.query_width, "k": draft.key_width, "v": draft.key_width}
        for name, width in widths.items():
            maker.linear(f"{key}.self_attn.{name}_proj", Role.DRAFT, (hidden, width))
        maker.linear(f"{key}.self_attn.o_proj", Role.DRAFT, (draft.query_width, hidden))
        inner = draft.intermediate_size
        maker.linear(f"{key}.mlp.gate_proj", Role.DRAFT, (hidden, inner))
        maker.linear(f"{key}.mlp.up_proj", Role.DRAFT, (hidden, inner))
        maker.linear(f"{key}.mlp.down_proj", Role.DRAFT, (inner, hidden))
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            maker.norm(f"{key}.{norm}", draft.head_dim)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            maker.norm(f"{key}.{norm}", hidden)
        for conv in ("attention_conv", "mlp_conv"):
            base = maker.streams.normal(key, KERNEL_SIDES, draft.conv_kernel_size, hidden)
            maker.plain(f"{key}.{conv}.base_kernel", base)
            maker.linear(f"{key}.{conv}.kernel_projection", Role.PLAIN, (hidden, groups))
    rank, selector = draft.selector_rank, "candidate_selector"
    for book in ("predecessor", "successor"):
        maker.plain(f"{selector}.{book}_codebook", maker.streams.normal(book, vocab, rank))
    maker.linear(f"{selector}.hidden_projection", Role.PLAIN, (hidden, rank))
    return maker.tensors


def write_sparse(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file with this header; only tensors off the `meta` device are written."""
    order = sorted(tensors, key=lambda name: (tensors[name].is_meta, name))
    header, offset = {}, 0
    written = bytearray()
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
        if not tensor.is_meta:
            written += tensor.contiguous().numpy().tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text + written)
        stream.truncate(8 + len(text) + offset)


def write_target(folder: Path, family: Family, geometry: Geometry) -> None:
    """The target's folder: configs, tokenizer and one sparse file."""
    tensors = target_headers(family, geometry)
    quantization = configs.quantization(RECIPES[family], tensors)
    processor = {"processor_config.json": configs.processor_config(geometry.vision)}
    _write(folder, tensors, configs.target_config(geometry, quantization), processor)


def write_drafter(folder: Path, geometry: Geometry, *, packed: bool) -> None:
    """The drafter's folder, BF16 or EXL3 at six bits."""
    recipe, text = DRAFT_EXL3 if packed else DRAFT_BF16, geometry.text
    tensors = draft_headers(recipe, geometry.draft, text.hidden_size, text.vocab_size)
    quantization = configs.quantization(recipe, tensors) if packed else None
    config = configs.draft_config(geometry, quantization)
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": DRAFT_WINDOW}
    _write(folder, tensors, config, {})


def _write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    extra: Mapping[str, Mapping[str, Any]],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_sparse(folder / SINGLE_FILE, tensors)
    write_tokenizer(folder)
    write_json(folder / "generation_config.json", configs.generation_config())
    for name, document in extra.items():
        write_json(folder / name, document)
    write_json(folder / "config.json", config)
