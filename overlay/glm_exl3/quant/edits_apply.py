"""Offer every matrix of a loaded model to the registered edits.

Runs once per model on each rank, when its tensors are in place and before vLLM's
`process_weights_after_loading` changes any layout. Without a registered edit nothing is walked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.sharding import Cut
from glm_exl3.log import logger
from glm_exl3.ops import library, table
from glm_exl3.ops.matrix import PackedMatrix
from glm_exl3.quant.edits import (
    Packing,
    Placement,
    WeightEdit,
    checked,
    refused,
    registered,
)
from glm_exl3.quant.names import parts_of
from glm_exl3.quant.params import LinearCollector
from glm_exl3.quant.shards import Geometry, Shard, layer_geometry
from glm_exl3.ref.reencode import reencode

_log = logger(__name__)
_COMPOSITE = "language_model."


@dataclass(frozen=True)
class Site:
    """One matrix of a model: its name, the whole shape, this rank's part and how to get at it.

    `made_with` names the edits that it has already, or is None.
    """

    module: str
    full_shape: tuple[int, int]
    placement: Placement
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]
    made_with: tuple[str, ...] | None = None


def apply_edits(
    model: torch.nn.Module, role: str, optional: Sequence[re.Pattern[str]] = ()
) -> dict[str, list[str]]:
    """Apply the registered edits that are for `role`; per edit the modules that it changed.

    Weights whose parameter name `optional` matches belong to another model and are left alone.
    Raises GlmExl3Error when an edit refuses, answers with another shape or with values that are not
    finite, or changed nothing.
    """
    edits = [edit for edit in registered() if role in edit.roles]
    changed: dict[str, list[str]] = {edit.name: [] for edit in edits}
    if not edits:
        return changed
    with torch.no_grad():
        for site in sites(model, role, optional):
            for edit in edits:
                if edit.wants(site.module) and _apply(edit, site):
                    changed[edit.name].append(site.module)
    for edit in edits:
        if not changed[edit.name]:
            raise GlmExl3Error(
                code="edit-unmatched",
                seen=f"edit {edit.name} changed no matrix of the {role} model",
                why="the weights would be served without the edit that was asked for",
                fix="correct the layers or names it is set to, or switch it off",
            )
        count = len(changed[edit.name])
        _log.warning("edit %s (%s) changed %d of the %s", edit.name, edit.digest, count, role)
    return changed


def _apply(edit: WeightEdit, site: Site) -> bool:
    """Whether `edit` changed the matrix, now or when it was recoded."""
    if site.made_with is not None:
        return edit.name in site.made_with
    packing = site.placement.packing
    if packing is not None and packing.bits not in range(1, 9):
        fix = "use a checkpoint whose matrix is dense, or packed at a whole rate"
        raise refused(edit, site.module, f"K={packing.bits:g} cannot be encoded again", fix)
    shard = site.read()
    answer = edit.edit(site.module, site.full_shape, shard, site.placement)
    if answer is None:
        return False
    site.write(checked(edit, site.module, shard, answer))
    return True


def sites(
    model: torch.nn.Module, role: str, optional: Sequence[re.Pattern[str]] = ()
) -> Iterator[Site]:
    """Every matrix of `model` that edits may change, in the order of its modules."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for path, module in model.named_modules():
        if any(pattern.search(f"{path}.weight") for pattern in optional):
            continue
        collector = getattr(module, "exl3_collector", None)
        name = _name(getattr(module, "prefix", None) or path, role)
        if isinstance(collector, LinearCollector):
            yield from _collected(module, name, collector)
        elif isinstance(module, ParallelLMHead):
            yield from _head(module, name)
        elif isinstance(module, LinearBase):
            yield from _merged(module, name)
        elif isinstance(module, torch.nn.Linear):
            yield _plain(module, name)


def _name(prefix: str, role: str) -> str:
    name = prefix.removeprefix(_COMPOSITE)
    return f"draft.{name.removeprefix('model.')}" if role == "draft" else name


def _rows(parameter: torch.nn.Parameter, start: int, stop: int) -> tuple[Any, Any]:
    """Reader and writer of some rows of a dense weight."""
    view = parameter.data[start:stop]

    def write(value: torch.Tensor) -> None:
        view.copy_(value)

    return (lambda: view), write


def _plain(module: torch.nn.Linear, name: str) -> Site:
    out, inputs = module.out_features, module.in_features
    placement = Placement(Cut(0, out, out), Cut(0, inputs, inputs))
    return Site(name, (out, inputs), placement, *_rows(module.weight, 0, out))


def _head(module: Any, name: str) -> Iterator[Site]:
    """The dense head: a range of the vocabulary, without vLLM's padding."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2:
        return
    indices = module.shard_indices
    start, stop = int(indices.org_vocab_start_index), int(indices.org_vocab_end_index)
    shape = (int(module.org_vocab_size), int(module.embedding_dim))
    placement = Placement(Cut(start, stop, weight.shape[0]), Cut(0, shape[1], shape[1]))
    yield Site(name, shape, placement, *_rows(weight, 0, stop - start))


def _merged(module: Any, name: str) -> Iterator[Site]:
    """The matrices side by side in a dense linear layer."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        return
    geometries = layer_geometry(module, module.input_size, module.output_size, free_width=False)
    names = parts_of(name, merged=len(geometries) > 1)
    cuts = [_dense_cuts(geometry) for geometry in geometries]
    if len(names) != len(geometries) or weight.shape[0] != sum(out.width for out, _ in cuts):
        raise GlmExl3Error(
            code="edit",
            seen=f"{name} holds {tuple(weight.shape)}, its {len(names)} matrices make another size",
            why="an edit would change the wrong rows",
            fix="report the checkpoint; without edits it can be served",
        )
    start = 0
    for module_name, geometry, (out, inputs) in zip(names, geometries, cuts, strict=True):
        shape = (geometry.out_features, geometry.in_features)
        access = _rows(weight, start, start + out.width)
        yield Site(module_name, shape, Placement(out, inputs), *access)
        start += out.width


def _dense_cuts(geometry: Geometry) -> tuple[Cut, Cut]:
    """(out, in) cuts of a matrix that vLLM divides equally."""
    rank, ranks = geometry.ranks
    sizes = [geometry.in_features, geometry.out_features]
    cuts = [Cut(0, size, size) for size in sizes]
    if geometry.cut is not None:
        width = sizes[geometry.cut] // ranks
        cuts[geometry.cut] = Cut(rank * width, (rank + 1) * width, width)
    return cuts[1], cuts[0]


def _collected(module: Any, name: str, collector: LinearCollector) -> Iterator[Site]:
    """The matrices of a layer that has packed ones."""
    shards = list(collector.shards.values())
    names = parts_of(name, merged=len(shards) > 1)
    for module_name, shard in zip(names, shards, strict=True):
        shape = (shard.geometry.out_features, shard.geometry.in_features)
        out, inputs = _inside(shard.out_cut, shape[0]), _inside(shard.in_cut, shape[1])
        taken = collector.taken(shard.key)
        if shard.layout is None:
            if "weight" in taken:
                access = _dense_access(collector, shard)
                yield Site(module_name, shape, Placement(out, inputs), *access)
            continue
        packing = Packing(shard.layout.bits, shard.layout.codebook)
        access = _packed_access(collector, shard, out, inputs)
        made_with = collector.facts.recoded.get(shard.source.module)
        placement = Placement(out, inputs, packing)
        yield Site(module_name, shape, placement, *access, made_with=made_with)


def _inside(cut: Cut, size: int) -> Cut:
    """The cut without what the converter padded."""
    return Cut(min(cut.start, size), min(cut.stop, size), cut.padded)


def _dense_access(collector: LinearCollector, shard: Shard) -> tuple[Any, Any]:
    def write(value: torch.Tensor) -> None:
        collector.store("weight", value.to(collector.dtype).contiguous(), shard.key)

    return (lambda: collector.taken(shard.key)["weight"]), write


def _packed_access(
    collector: LinearCollector, shard: Shard, out: Cut, inputs: Cut
) -> tuple[Any, Any]:
    """Decode a packed matrix, and encode it again with its scales."""
    row = table.choose(table.Device.of(collector.device))

    def whole() -> tuple[PackedMatrix, torch.Tensor]:
        matrix = collector.matrix(shard)
        return matrix, library.dequant(matrix, torch.float32, row.name)

    def read() -> torch.Tensor:
        return whole()[1][: inputs.width, : out.width].t().contiguous()

    def write(value: torch.Tensor) -> None:
        matrix, weight = whole()
        weight[: inputs.width, : out.width] = value.t()
        bits = int(matrix.trellis.shape[-1]) // 16

        def encoder(tiles: torch.Tensor, rate: int, codebook: Any) -> torch.Tensor:
            return library.encode(tiles, rate, codebook, row.name)

        code = matrix.codebook
        trellis = reencode(weight, matrix.suh, matrix.svh, bits, code, encoder)
        collector.store("trellis", trellis, shard.key)

    return read, write
