"""Loading weights so that nothing happens silently.

`load_checked` wraps a model's own `load_weights`: headers and model are matched first, fused
checkpoint tensors are split into the parts vLLM knows, every failure inside vLLM's loaders is
raised again with the tensor it happened at, and a dense parameter that is not fully written
afterwards is an error: parameters are filled with NaN before loading, so uninitialised memory
cannot pass for weights. Packed matrices report what they miss when their layer is finished.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from glm_exl3 import envs
from glm_exl3.format.errors import FormatError, GlmExl3Error
from glm_exl3.log import logger
from glm_exl3.quant.completeness import Naming, check_headers, ignored_patterns
from glm_exl3.quant.edits_apply import apply_edits
from glm_exl3.quant.facts import Facts
from glm_exl3.quant.names import CONV_FUSED, CONV_PARTS, KDA_FUSED, KDA_FUSED_PARTS

Weights = Iterable[tuple[str, torch.Tensor]]

_FUSED = re.compile(
    rf"^(?P<stem>.*\.self_attn\.)(?P<module>{KDA_FUSED}|{CONV_FUSED})\.(?P<leaf>\w+)$"
)
_log = logger(__name__)
_active: ContextVar[bool] = ContextVar("exl3_load_active", default=False)


def split_fused(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A fused KDA tensor as its q, k and v parts; any other tensor as it is.

    Parts lie side by side along n, so a trellis splits along its second dimension, output scales,
    convolutions and dense weights along their first; input scales and markers serve every part.
    """
    match = _FUSED.match(name)
    if match is None:
        yield name, tensor
        return
    parts = KDA_FUSED_PARTS if match["module"] == KDA_FUSED else CONV_PARTS
    leaf = match["leaf"]
    if leaf in ("suh", "su", "mcg", "mul1"):
        pieces = [tensor] * len(parts)
    else:
        pieces = list(tensor.chunk(len(parts), dim=1 if leaf == "trellis" else 0))
    for part, piece in zip(parts, pieces, strict=True):
        yield f"{match['stem']}{part}.{leaf}", piece


def _recoded(weights: Weights, facts: Facts) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights with recoded matrices in place of the dense ones they were made of."""
    from glm_exl3.quant.recode_cache import recoded_tensors

    for name, tensor in weights:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or module not in facts.recoded:
            yield name, tensor
    yield from recoded_tensors(facts)


class _Stream:
    """The weights on their way to vLLM; remembers which tensor is under way."""

    def __init__(self, weights: Weights, facts: Facts, *, split: bool) -> None:
        self._weights = _recoded(weights, facts) if facts.recoded else weights
        self._split = split
        self._ignored = ignored_patterns()
        self.current: str | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            self.current = name
            if any(pattern.search(name) for pattern in self._ignored):
                _log.warning("tensor %s is ignored as %s asks", name, envs.IGNORE_TENSORS.name)
            elif self._split:
                yield from split_fused(name, tensor)
            else:
                yield name, tensor


def poison(model: torch.nn.Module, naming: Naming) -> list[str]:
    """Fill every dense floating-point parameter that must be loaded with NaN; their names."""
    names = []
    with torch.no_grad():
        for name, value in model.named_parameters():
            needed = not any(pattern.search(name) for pattern in naming.optional)
            if value.numel() and needed and value.is_floating_point() and not value.is_meta:
                value.fill_(float("nan"))
                names.append(name)
    return names


def check_written(model: torch.nn.Module, names: list[str]) -> None:
    """Raise FormatError for a parameter that still holds NaN: not written, or stored as NaN.

    Rows of a vocabulary that only exist as padding are not looked at.
    """
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    for name in names:
        value = parameters.get(name)
        if value is None:
            continue
        module = modules[name.rpartition(".")[0]]
        shard = getattr(module, "shard_indices", None)
        rows = value if shard is None else value[: shard.num_org_elements]
        if bool(torch.isnan(rows).any()):
            raise FormatError(
                code="unwritten",
                seen=f"parameter {name} holds {int(torch.isnan(rows).sum())} NaN after loading",
                why="these values were never read from the checkpoint, or are NaN in it",
                fix="fetch the checkpoint again; if it is complete, report it",
                tensor=name,
            )


def load_checked(
    model: torch.nn.Module,
    weights: Weights,
    load: Callable[[Weights], Any],
    *,
    facts: Facts | None,
    naming: Naming,
) -> Any:
    """Run `load` on `weights` under the rules of this module; its result is returned.

    A nested call (an inner model inside an outer one) only passes through. Without `facts` the
    checkpoint is not packed at all and only edits change it. Raises GlmExl3Error.
    """
    if _active.get():
        return load(weights)
    if facts is None:
        result = load(weights)
        apply_edits(model, naming.role, naming.optional)
        return result
    check_headers(model, facts, naming)
    names = poison(model, naming)
    stream = _Stream(weights, facts, split=naming.splits_fused)
    token = _active.set(True)
    try:
        result = load(stream)
    except GlmExl3Error:
        raise
    except Exception as error:
        tensor = stream.current or "(before the first tensor)"
        raise facts.error(
            tensor,
            code="load",
            seen=f"loading stopped at this tensor: {type(error).__name__}: {error}",
            why="a model that is only partly loaded must not serve",
            fix="check that config.json belongs to these weights; otherwise report the checkpoint",
        ) from error
    finally:
        _active.reset(token)
    check_written(model, names)
    apply_edits(model, naming.role, naming.optional)
    return result
