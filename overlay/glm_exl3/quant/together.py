"""Merged layers whose parts share one launch, and gate and up that leave as their activation.

`GLM_EXL3_TOGETHER` names what is taken; a checkpoint's neighbours that could become one matrix have
become one before, so here parts differ in input scales, rates or packing. Nothing changes for more
tokens than the kernel takes.

Shared experts are a name of their own: they run beside the routed ones, and what their launches
hold of the multiprocessors counts (docs/kernels.md, "Several matrices").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from glm_exl3.log import logger
from glm_exl3.ops import fused_names, library
from glm_exl3.ops.matrix import PackedMatrix

FEW_TOKENS = 8
SHARED = "shared_experts"  # a part of their modules' names

_log = logger(__name__)


class Part(Protocol):
    """What is asked of a layer's term."""

    @property
    def matrix(self) -> PackedMatrix | torch.Tensor: ...
    @property
    def width(self) -> int: ...
    @property
    def inputs(self) -> int: ...


def share(terms: Sequence[Part], prefix: str = "") -> bool:
    """Whether the settings have these terms of the layer `prefix` multiplied together.

    They read the same inputs, keep all of their outputs and one at least is packed.
    """
    names = fused_names.together()
    dense = [isinstance(term.matrix, torch.Tensor) for term in terms]
    if "parts" not in names or all(dense) or _left_out(prefix):
        return False
    return alike(terms) and ("dense" in names or not any(dense))


def alike(terms: Sequence[Part]) -> bool:
    """Whether there are several, which read the same inputs and keep all of their outputs."""
    same = len({term.inputs for term in terms}) == 1
    return len(terms) > 1 and same and all(_whole(term) for term in terms)


def _left_out(prefix: str) -> bool:
    return SHARED in prefix.split(".") and "shared" not in fused_names.together()


def _whole(term: Part) -> bool:
    matrix = term.matrix
    if isinstance(matrix, torch.Tensor):
        return tuple(matrix.shape) == (term.width, term.inputs)
    return (matrix.in_features, matrix.out_features) == (term.inputs, term.width)


class Activated(torch.nn.Module):
    """vLLM's activation, or nothing where the gate/up layer before has already applied it."""

    def __init__(self, act: torch.nn.Module, layer: torch.nn.Module) -> None:
        super().__init__()
        self.act = act
        self._before = (layer,)  # no child of this module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2 * width], or [..., width] as the layer before left it -> [..., width]."""
        width = sum(term.width for term in self._before[0].exl3.terms)
        y: torch.Tensor = self.act(x) if x.shape[-1] == width else x
        return y


def join_activations(model: torch.nn.Module) -> int:
    """Let the packed gate/up layers below `model` apply the activation for few tokens.

    Returns how many; none unless the setting names `activation`. Called before weights are loaded.
    """
    if "activation" not in fused_names.together():
        return 0
    found = 0
    for module in model.modules():
        act, layer = getattr(module, "act_fn", None), getattr(module, "gate_up_proj", None)
        if layer is None or not _is_plain_swiglu(act) or not hasattr(layer, "exl3_collector"):
            continue
        if _left_out(layer.quant_method.prefix):
            continue
        layer.exl3_limit = float(getattr(act, "swiglu_limit", math.inf))
        module.act_fn = Activated(act, layer)
        found += 1
    _log.info("activation with gate and up: %d layers", found)
    return found


def _is_plain_swiglu(act: Any) -> bool:
    """silu(gate) * up, clamped or not, without the factors that other models add."""
    factors = (getattr(act, "alpha", 1.0), getattr(act, "beta", 0.0))
    return type(act).__name__ in {"SiluAndMul", "SiluAndMulWithClamp"} and factors == (1.0, 0.0)


def gated(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The activation of a gate/up layer, or None where it is not asked for or cannot be had."""
    limit = getattr(layer, "exl3_limit", None)
    if limit is None or not layer.exl3.together or not 0 < x.numel() <= FEW_TOKENS * x.shape[-1]:
        return None
    terms: Sequence[Part] = layer.exl3.terms
    packed = [term.matrix for term in terms if isinstance(term.matrix, PackedMatrix)]
    if len(terms) != 2 or len(packed) != 2:
        return None
    return library.parts(x, packed, limit, layer.exl3.backend)
