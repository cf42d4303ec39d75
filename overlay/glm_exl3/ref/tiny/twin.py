"""The dequantised twin of a packed checkpoint, as transformers loads it.

What: `dequantised_state_dict` reads a packed folder of either family and returns Hugging Face
names and shapes: every trellis decoded, the fused KDA projection and convolution split into q, k
and v. Why in the checkpoint's own names: transformers' `from_pretrained` converts them (experts
merged, gates renamed), so the twin also tests that path.

What must stay true: the twin holds exactly the values of the packed checkpoint, rounded once to
`dtype`; tensors that every reader keeps in fp32 stay fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from glm_exl3.format.layout import Codebook
from glm_exl3.ref.decode import dequantize

_PACKED = ("trellis", "suh", "svh", "mcg", "mul1")
_CONV = ".self_attn.conv1d.weight"
_QKV = ".self_attn.qkv_proj.weight"


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, by name."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def codebook_in(tensors: Mapping[str, Tensor], module: str) -> Codebook:
    """The codebook of a packed module, from its marker tensor."""
    for codebook in (Codebook.MCG, Codebook.MUL1):
        if f"{module}.{codebook.value}" in tensors:
            return codebook
    return Codebook.INST3


def decode_modules(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every packed module as `module.weight` [out, in], every other tensor as it is."""
    decoded = {name: t for name, t in tensors.items() if name.rpartition(".")[2] not in _PACKED}
    for name in tensors:
        if not name.endswith(".trellis"):
            continue
        module = name.removesuffix(".trellis")
        scales = tensors[f"{module}.suh"], tensors[f"{module}.svh"]
        weight = dequantize(tensors[name], *scales, codebook_in(tensors, module))
        decoded[f"{module}.weight"] = weight.T.to(dtype).contiguous()
    return decoded


def split_kda(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fused `qkv_proj` and `conv1d` weights as the q, k and v tensors of Hugging Face."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for suffix, pattern in ((_QKV, "{}_proj"), (_CONV, "{}_conv1d")):
            if name.endswith(suffix):
                stem = name.removesuffix(suffix) + ".self_attn."
                for part, letter in zip(tensor.chunk(3), "qkv", strict=True):
                    split[f"{stem}{pattern.format(letter)}.weight"] = part.contiguous()
                break
        else:
            split[name] = tensor
    return split


def dequantised_state_dict(
    folder: Path, *, mtp: bool = False, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """The tensors of a packed folder under the names that transformers reads.

    Without `mtp` the MTP layer, which transformers does not have, is left out. fp32 tensors keep
    their dtype, all others get `dtype`.
    """
    tensors = split_kda(decode_modules(read_tensors(folder), dtype))
    if not mtp:
        prefix = f"model.language_model.layers.{_layers(tensors) - 1}."
        if f"{prefix}eh_proj.weight" in tensors:
            tensors = {name: t for name, t in tensors.items() if not name.startswith(prefix)}
    return {
        name: t if t.dtype is torch.float32 else t.to(dtype) for name, t in sorted(tensors.items())
    }


def _layers(tensors: Mapping[str, Tensor]) -> int:
    marker = "language_model.layers."
    return 1 + max(int(n.split(marker)[1].split(".")[0]) for n in tensors if marker in n)
