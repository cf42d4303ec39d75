"""From training modules to checkpoint tensors: names, split experts, storage dtypes.

The result is the source-native form that both EXL3 families start from: names of the published
checkpoint, BF16 matrices, FP32 for what the model keeps in FP32 (hyper-connections, convolutions,
decay parameters, router bias, index key norm and pool offsets). FP32 tensors are rounded to what
BF16 can hold, since readers differ in which of the two they use.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

PREFIX = "model.language_model."
_RENAMED = (
    (re.compile(r"\.attn_hc\.(fn|base|scale)$"), r".hc_attn_\1"),
    (re.compile(r"\.ffn_hc\.(fn|base|scale)$"), r".hc_ffn_\1"),
    (re.compile(r"\.shared_head_norm\."), ".shared_head.norm."),
)
_FULL_PRECISION = re.compile(
    r"hc_(attn|ffn)_|conv1d|A_log|dt_bias|e_score_correction_bias|indexer\.k_norm|compress_ape"
)
_EXPERTS = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")


def split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The per-expert matrices of a stacked parameter, or the tensor itself under its own name."""
    found = _EXPERTS.match(name)
    if not found:
        return {name: tensor}
    stem, kind = found.groups()
    parts: dict[str, Tensor] = {}
    for index, matrix in enumerate(tensor):
        if kind == "down_proj":
            parts[f"{stem}.{index}.down_proj.weight"] = matrix
            continue
        gate, up = matrix.chunk(2, dim=0)
        parts[f"{stem}.{index}.gate_proj.weight"] = gate
        parts[f"{stem}.{index}.up_proj.weight"] = up
    return parts


def stored(name: str, tensor: Tensor) -> Tensor:
    """The tensor as stored, on the CPU: FP32 ones hold values that BF16 can hold, too."""
    kind = torch.float32 if _FULL_PRECISION.search(name) else torch.bfloat16
    return tensor.detach().to("cpu", torch.bfloat16).to(kind).contiguous()


def named_tensors(module: nn.Module, stem: str) -> dict[str, Tensor]:
    """Checkpoint tensors of one module whose own names start below `stem`."""
    result: dict[str, Tensor] = {}
    for own, tensor in module.state_dict().items():
        name = stem + own
        for pattern, replacement in _RENAMED:
            name = pattern.sub(replacement, name)
        for part, value in split_experts(name, tensor).items():
            result[part] = stored(part, value)
    return result


def checkpoint_tensors(
    target: nn.Module, predictor: nn.Module | None, layers: int
) -> dict[str, Tensor]:
    """All tensors of the target and, if given, of the MTP layer (index = number of layers)."""
    result = named_tensors(target, PREFIX)
    result["lm_head.weight"] = result.pop(PREFIX + "lm_head.weight")
    if predictor is not None:
        result |= named_tensors(predictor, f"{PREFIX}layers.{layers}.")
    return result
