"""Every checkpoint tensor has a taker and every parameter a tensor, decided before weights are
read.

vLLM's model loaders skip what they do not know in several places and never notice a shard of a
merged layer that did not come. So the names and shapes of the safetensors headers are matched
against the parameters of the built model in both directions first; nothing of a checkpoint that
fails here is read. Packed modules are matched by their collectors, which know their five tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from glm_exl3 import envs
from glm_exl3.format.errors import FormatError
from glm_exl3.format.metadata import PACKED_LEAVES
from glm_exl3.quant.facts import Facts
from glm_exl3.quant.names import (
    CONV_FUSED,
    CONV_PARTS,
    EXPERT_SHARDS,
    KDA_FUSED,
    KDA_FUSED_PARTS,
    MERGED,
    split_prefix,
)
from glm_exl3.quant.params import missing

FLOATS = ("BF16", "F16", "F32")
_EXPERT = re.compile(r"^(?P<experts>.*\.experts)\.\d+\.(?P<part>\w+)\.(?P<leaf>\w+)$")
_STACK = {part: "w2" if shard == "w2" else "w13" for shard, part in EXPERT_SHARDS.items()}


Taker = Callable[[str], bool]
"""Whether the model has a parameter for a module under a name of its own, packed or dense."""


@dataclass(frozen=True)
class Naming:
    """How one model names what a checkpoint holds.

    `to_vllm` maps a tensor name into the model's names, or to None for tensors that are not this
    model's business; `knows` says of those whether any model of this architecture would take them.
    `optional` matches parameters that need no tensor; `role` is the model's among `edits.ROLES`.
    """

    to_vllm: Callable[[str], str | None]
    knows: Callable[[str, Taker], bool] = lambda name, taker: True
    optional: tuple[re.Pattern[str], ...] = ()
    splits_fused: bool = True
    role: str = "target"


@dataclass
class _Coverage:
    """Which parts of which parameter the checkpoint covers, and how parents are called there."""

    parts: dict[str, set[str]] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)


def check_headers(model: torch.nn.Module, facts: Facts, naming: Naming) -> None:
    """Match headers and model. Raises FormatError for a tensor nobody takes, one that is missing,
    or one whose shape is not the model's.
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    ignored = ignored_patterns()
    coverage = _Coverage()

    def taker(name: str) -> bool:
        stem, leaf = split_prefix(name)
        leaves = {leaf, *(("weight", *PACKED_LEAVES) if leaf in ("weight", *PACKED_LEAVES) else ())}
        return any(next(_targets(stem + leaf, parameters, naming), None) for leaf in leaves)

    for tensor in facts.index.tensors:
        name = naming.to_vllm(tensor)
        if any(pattern.search(tensor) for pattern in ignored):
            continue
        if name is None:
            if not naming.knows(tensor, taker):
                raise _nobody(facts, tensor)
            continue
        targets = list(_targets(name, parameters, naming))
        if not targets:
            raise _nobody(facts, tensor)
        coverage.parents[_grandparent(name)] = _grandparent(tensor)
        for parameter, part in targets:
            coverage.parts.setdefault(parameter, set()).add(part)
            _check_dtype(facts, tensor, parameters[parameter])
            _check_shape(facts, tensor, modules, parameters, parameter, part, len(targets))
    for parameter, value in parameters.items():
        if value.numel() and not any(p.search(parameter) for p in naming.optional):
            _check_covered(facts, parameter, coverage)


def ignored_patterns() -> list[re.Pattern[str]]:
    """What GLM_EXL3_IGNORE_TENSORS lets through without a taker."""
    return [re.compile(pattern) for pattern in envs.IGNORE_TENSORS.read()]


def _targets(
    name: str, parameters: dict[str, torch.nn.Parameter], naming: Naming
) -> Iterator[tuple[str, str]]:
    """(parameter, part) pairs that tensor `name` fills; empty when nobody takes it."""
    module, leaf = split_prefix(name)
    parent, part = split_prefix(module.rstrip("."))
    fused = {KDA_FUSED: KDA_FUSED_PARTS, CONV_FUSED: CONV_PARTS}.get(part)
    if naming.splits_fused and fused is not None and name not in parameters:
        for piece in fused:
            yield from _targets(f"{parent}{piece}.{leaf}", parameters, naming)
        return
    if name in parameters:
        yield name, part
        return
    expert = _EXPERT.match(name)
    if expert and expert["part"] in _STACK:
        target = f"{expert['experts']}.routed_experts.{_STACK[expert['part']]}_{expert['leaf']}"
        if target in parameters:
            yield target, part
        return
    for layer, members in MERGED.items():
        target = f"{parent}{layer}.{leaf}"
        if part in members and target in parameters:
            yield target, part


def _grandparent(name: str) -> str:
    """The name without module and leaf: `a.b.q_proj.weight` -> `a.b.`."""
    return split_prefix(split_prefix(name)[0].rstrip("."))[0]


def _nobody(facts: Facts, tensor: str) -> FormatError:
    packed = tensor.rpartition(".")[2] in PACKED_LEAVES
    return facts.error(
        tensor,
        code="unexpected-tensor",
        seen="nobody takes this tensor",
        why="a packed matrix where the model has none would be left out"
        if packed
        else "weights that are left out change the answers without a word",
        fix=f"use a checkpoint of this model, or name the tensor in {envs.IGNORE_TENSORS.name} "
        "if it is known to be of no use",
    )


def _check_covered(facts: Facts, parameter: str, coverage: _Coverage) -> None:
    """Raise FormatError when a part of a dense parameter has no tensor."""
    module, leaf = split_prefix(parameter)
    parent, layer = split_prefix(module.rstrip("."))
    found = coverage.parts.get(parameter, set())
    wanted = MERGED.get(layer, ())
    plain = layer in found or not wanted
    if plain and found:
        return
    absent = [part for part in wanted if part not in found] if wanted else [layer]
    if absent:
        stem = coverage.parents.get(parent, parent)
        raise missing(facts, f"{stem}{absent[0]}.{leaf}" if absent[0] else f"{stem}{leaf}")


def _check_dtype(facts: Facts, tensor: str, value: torch.nn.Parameter) -> None:
    """Raise FormatError when a dense floating-point parameter would be filled with something
    else."""
    dtype = facts.index.tensors[tensor].dtype
    if value.numel() and value.is_floating_point() and dtype not in FLOATS:
        raise facts.error(
            tensor,
            code="dtype",
            seen=f"stored as {dtype}, the model needs one of {', '.join(FLOATS)}",
            why="copying converts the numbers without knowing what they mean",
            fix="use a checkpoint of this model; other quantisations do not mix with EXL3",
        )


def _check_shape(  # noqa: PLR0913 - the tensor, the model and the place where they meet
    facts: Facts,
    tensor: str,
    modules: dict[str, Any],
    parameters: dict[str, torch.nn.Parameter],
    parameter: str,
    part: str,
    pieces: int,
) -> None:
    """Raise FormatError when a dense tensor is not of the size the model has for it."""
    value = parameters[parameter]
    if not value.numel():
        return
    stored = facts.shape_of(tensor) or ()
    module_name, leaf = split_prefix(parameter)
    module = modules[module_name.rstrip(".")]
    for want in _full_shapes(module, module_name.rstrip("."), leaf, value, part):
        squeezed = [size for size in want if size != 1]
        if pieces > 1 and squeezed:
            squeezed[0] *= pieces
        if [size for size in stored if size != 1] == squeezed:
            return
    raise facts.error(
        tensor,
        code="shape",
        seen=f"stored as {list(stored)}, the model holds {list(value.shape)} of it on this rank",
        why="configuration and checkpoint do not belong together",
        fix="use the config.json that was stored with these weights",
    )


def _full_shapes(
    module: Any, name: str, leaf: str, value: torch.nn.Parameter, part: str
) -> Iterator[tuple[int, ...]]:
    """Shapes the whole tensor behind a rank's parameter may have."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    ranks = int(getattr(module, "tp_size", 1) or 1)
    if isinstance(module, VocabParallelEmbedding):
        yield (int(module.org_vocab_size), *value.shape[1:])
        return
    if isinstance(module, LinearBase) and leaf in ("weight", "bias"):
        inputs = (int(module.input_size),) if leaf == "weight" else ()
        sizes = getattr(module, "output_sizes", None)
        members = MERGED.get(split_prefix(name)[1], ())
        if sizes is not None and part in members:
            index = members.index(part)
            replicated = index in getattr(module, "replicated_shard_ids", ())
            size = _heads_size(module, index) or sizes[index] // (ranks if replicated else 1)
            yield (size, *inputs)
            return
        yield (int(module.output_size), *inputs)
        return
    yield tuple(value.shape)
    for dim, size in enumerate(value.shape):
        yield (*value.shape[:dim], size * ranks, *value.shape[dim + 1 :])


def _heads_size(module: Any, index: int) -> int | None:
    """Out features of q, k or v before key/value heads are replicated; None for other layers."""
    if not hasattr(module, "total_num_kv_heads"):
        return None
    heads = module.total_num_heads if index == 0 else module.total_num_kv_heads
    return int(heads) * int(module.v_head_size if index == 2 else module.head_size)
