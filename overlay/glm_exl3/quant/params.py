"""Collector parameters: they take checkpoint tensors as vLLM hands them out.

vLLM's loaders look a parameter up by name and call its `weight_loader`. An EXL3 matrix is five
small tensors whose cut differs per tensor, so each of them gets an empty placeholder parameter
whose loader belongs to one `LinearCollector` per layer. The collector cuts every tensor for its
rank at once, so a rank never keeps more than its share, and `finish` returns complete matrices or
names what is missing. What must stay true: a tensor is either stored, refused with an error, or
never offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from glm_exl3.format.errors import FormatError
from glm_exl3.format.layout import TILE, MatrixLayout, codebook_of
from glm_exl3.format.metadata import PACKED_LEAVES
from glm_exl3.format.sharding import Cut
from glm_exl3.ops.matrix import PackedMatrix
from glm_exl3.quant.facts import Facts
from glm_exl3.quant.shards import Key, Shard
from glm_exl3.ref.decode import channel_scales


def checked_scales(facts: Facts, tensor: str, value: torch.Tensor, length: int) -> torch.Tensor:
    """`value` as fp16 scales [length]. Raises FormatError for a wrong length or non-finite
    values."""
    scales = channel_scales(value).to(torch.float16)
    if scales.shape != (length,):
        raise facts.error(
            tensor,
            code="shape",
            seen=f"{tuple(value.shape)} scales for {length} channels",
            why="every channel of the matrix has one scale",
            fix="the checkpoint is damaged: fetch this file again",
        )
    if not bool(torch.isfinite(scales).all()):
        raise facts.error(
            tensor,
            code="non-finite",
            seen=f"{int((~torch.isfinite(scales)).sum())} of {length} scales are not finite",
            why="one such scale turns every output of the layer into NaN",
            fix="the checkpoint is damaged: fetch this file again or convert the model again",
        )
    return scales


def checked_trellis(
    facts: Facts, tensor: str, value: torch.Tensor, layout: MatrixLayout, parts: int = 1
) -> torch.Tensor:
    """`value` if it is the int16 trellis that the header promised, else FormatError.

    `parts` is how many equal column parts the stored matrix was split into before.
    """
    want = (layout.k_tiles, layout.n_tiles // parts, layout.last_dim)
    if tuple(value.shape) != want or value.dtype != torch.int16:
        raise facts.error(
            tensor,
            code="shape",
            seen=f"{value.dtype} {tuple(value.shape)}, header says int16 {want}",
            why="the packed bits do not describe this matrix",
            fix="the checkpoint changed while it was read: start again",
        )
    return value


def cut_tiles(trellis: torch.Tensor, rows: Cut, columns: Cut) -> torch.Tensor:
    """The tiles [(stop-start)/16, ...] of a rank, padded with zero bits to the padded widths."""
    part = trellis[
        rows.start // TILE : rows.stop // TILE, columns.start // TILE : columns.stop // TILE
    ]
    return pad_tail(pad_tail(part, 0, rows.padded // TILE), 1, columns.padded // TILE)


def cut_scales(scales: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The scales of a rank; padding is zero, which makes padded channels contribute nothing."""
    return pad_tail(scales[cut.start : cut.stop], 0, cut.padded)


def pad_tail(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """`value` with zeros appended along `dim` up to `size`."""
    missing = size - value.shape[dim]
    if missing <= 0:
        return value
    shape = list(value.shape)
    shape[dim] = missing
    return torch.cat([value, value.new_zeros(shape)], dim)


class LinearCollector:
    """Takes the tensors of one linear layer, packed and dense shards mixed."""

    def __init__(
        self, shards: Sequence[Shard], facts: Facts, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shards = {shard.key: shard for shard in shards}
        self.facts = facts
        self.device = device
        self.dtype = dtype
        self._taken: dict[Key, dict[str, torch.Tensor]] = {key: {} for key in self.shards}

    def attach(self, layer: torch.nn.Module) -> None:
        """Register the placeholder parameters on `layer`."""
        packed = any(shard.layout for shard in self.shards.values())
        dense = any(shard.layout is None for shard in self.shards.values())
        leaves = (*PACKED_LEAVES, "weight") if packed and dense else PACKED_LEAVES
        for leaf in leaves:
            layer.register_parameter(leaf, self._placeholder(leaf))

    def detach(self, layer: torch.nn.Module) -> None:
        """Remove the placeholders; the layer's matrices live elsewhere from here on."""
        for leaf in (*PACKED_LEAVES, "weight"):
            if leaf in layer._parameters:
                del layer._parameters[leaf]

    def _placeholder(self, leaf: str) -> torch.nn.Parameter:
        dtype = self.dtype if leaf == "weight" else torch.float16
        placeholder = torch.nn.Parameter(
            torch.empty(0, dtype=dtype, device=self.device), requires_grad=False
        )

        def load(param: Any, value: torch.Tensor, shard_id: Key = None) -> None:
            key = shard_id if shard_id is not None else getattr(value, "shard_id", None)
            self.take(leaf, value, key)

        placeholder.weight_loader = load
        return placeholder

    def take(self, leaf: str, value: torch.Tensor, key: Key) -> None:
        """Store this rank's part of one tensor. Raises FormatError when it does not belong here."""
        shard = self.shards.get(key)
        if shard is None:
            raise self._refuse(leaf, next(iter(self.shards.values())), f"shard {key!r} is unknown")
        if leaf in self._taken[key]:
            raise self._refuse(leaf, shard, "it was offered twice")
        if (leaf == "weight") != (shard.layout is None):
            kind = "dense" if shard.layout is None else "packed"
            raise self._refuse(leaf, shard, f"the module is {kind} by its headers")
        self.store(leaf, self._local(leaf, value, shard).to(self.device), key)

    def store(self, leaf: str, local: torch.Tensor, key: Key) -> None:
        """Keep a tensor that is already cut for this rank and on its device."""
        self._taken[key][leaf] = local

    def taken(self, key: Key) -> dict[str, torch.Tensor]:
        """What one shard has so far: leaf -> this rank's part of the tensor."""
        return self._taken[key]

    def matrix(self, shard: Shard) -> PackedMatrix:
        """A packed shard as far as it has come. Raises FormatError for a missing tensor."""
        return self._packed(self._taken[shard.key], shard)

    def _local(self, leaf: str, value: torch.Tensor, shard: Shard) -> torch.Tensor:
        tensor = f"{shard.source.module}.{leaf}"
        rows, columns = shard.in_cut, shard.out_cut
        if leaf == "weight":
            self._check_dense(tensor, value, shard)
            part = value[columns.start : columns.stop, rows.start : rows.stop]
            return part.to(self.dtype).contiguous()
        if leaf in ("mcg", "mul1"):
            marker = {leaf: int(value.item())}
            codebook_of(
                shard.source.module,
                marker.get("mcg"),
                marker.get("mul1"),
                file=self.facts.file_of(tensor),
            )
            return value.reshape(()).clone()
        assert shard.layout is not None
        if leaf == "trellis":
            parts = shard.source.parts
            checked_trellis(self.facts, tensor, value, shard.layout, parts)
            return cut_tiles(value, rows, columns).contiguous()
        cut = rows if leaf in ("suh", "su") else columns
        channels = self._channels(leaf, shard)
        return cut_scales(checked_scales(self.facts, tensor, value, channels), cut).contiguous()

    def _channels(self, leaf: str, shard: Shard) -> int:
        assert shard.layout is not None
        if leaf in ("suh", "su"):
            return shard.layout.in_features
        return shard.layout.out_features // shard.source.parts

    def _check_dense(self, tensor: str, value: torch.Tensor, shard: Shard) -> None:
        want = (shard.geometry.out_features, shard.geometry.in_features)
        if tuple(value.shape) != want:
            raise self.facts.error(
                tensor,
                code="shape",
                seen=f"shape {tuple(value.shape)}, the model needs {want}",
                why="configuration and checkpoint do not belong together",
                fix="use the config.json that was stored with these weights",
            )

    def _refuse(self, leaf: str, shard: Shard, reason: str) -> FormatError:
        return self.facts.error(
            f"{shard.source.module}.{leaf}",
            code="unexpected-tensor",
            seen=f"nobody takes this tensor: {reason}",
            why="a tensor that is ignored means weights that are not what the checkpoint says",
            fix="remove the tensor or report the checkpoint",
        )

    def finish(self) -> list[PackedMatrix | torch.Tensor]:
        """One packed matrix, or dense weight [n, k], per shard in order.

        Raises FormatError that names the first missing tensor.
        """
        return [self._finish(shard) for shard in self.shards.values()]

    def _finish(self, shard: Shard) -> PackedMatrix | torch.Tensor:
        taken = self._taken.pop(shard.key)
        if shard.layout is None:
            return self._need(taken, shard, "weight")
        return self._packed(taken, shard)

    def _packed(self, taken: dict[str, torch.Tensor], shard: Shard) -> PackedMatrix:
        assert shard.layout is not None
        return PackedMatrix(
            self._need(taken, shard, "trellis"),
            self._need(taken, shard, "suh", "su"),
            self._need(taken, shard, "svh", "sv"),
            shard.layout.codebook,
        )

    def _need(self, taken: dict[str, torch.Tensor], shard: Shard, *leaves: str) -> torch.Tensor:
        for leaf in leaves:
            if leaf in taken:
                return taken[leaf]
        raise missing(self.facts, f"{shard.source.module}.{leaves[0]}")


def missing(facts: Facts, tensor: str) -> FormatError:
    """The error for a tensor that the model needs and nobody delivered."""
    return facts.error(
        tensor,
        code="missing-tensor",
        seen="the model needs this tensor and the checkpoint did not deliver it",
        why="the layer would compute with uninitialised memory",
        fix="fetch the checkpoint again; if it is complete, report it",
    )
