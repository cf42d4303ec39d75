"""vLLM's linear layers over packed matrices.

A merged layer keeps one matrix per checkpoint module, because bits and scales differ per module;
neighbours that share code and input scales become one matrix when loading ends, so equal gate/up
scales or a fused KDA projection cost one rotated input. On devices whose back end decodes on load
the whole layer becomes one dense weight. The parallel layers around it do the collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.linear import LinearMethodBase

from glm_exl3.ops import dense_rows, library, reference, table
from glm_exl3.ops.matrix import PackedMatrix
from glm_exl3.quant import together
from glm_exl3.quant.facts import Facts
from glm_exl3.quant.names import FREE_WIDTH, Source, split_prefix
from glm_exl3.quant.params import LinearCollector
from glm_exl3.quant.shards import Shard, layer_geometry, make_shard


@dataclass(frozen=True)
class Term:
    """One product of a layer: a packed matrix or a dense weight [n, k].

    `width` is what the layer's output keeps of it; `inputs` is what the matrix reads, which may be
    more than the activations have (zero padding to whole blocks). `wide` is `widen` of a dense
    weight.
    """

    matrix: PackedMatrix | torch.Tensor
    width: int
    inputs: int
    wide: torch.Tensor | None = None


@dataclass(frozen=True)
class LoadedLinear:
    """The finished matrices of one layer and the back end that multiplies with them."""

    terms: tuple[Term, ...]
    backend: str
    together: bool = False  # by one operation; see `quant.together`
    own_rows: bool = False  # dense terms by `ops.dense_rows`
    alike: bool = False  # see `quant.together`

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., k] -> [..., sum of widths] in x.dtype."""
        y = self._apply(x)
        return y if bias is None else y + bias

    def _apply(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] == self.terms[0].inputs:
            matrices = [term.matrix for term in self.terms]
            if self.together:
                return library.parts(x, matrices, None, self.backend)
            if self.alike:
                return library.side_by_side(x, matrices, self.own_rows, self.backend)
        outputs = self.products(x)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def products(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The output of every term apart, in order: what `apply` lays side by side."""
        return [self._product(x, term) for term in self.terms]

    def _product(self, x: torch.Tensor, term: Term) -> torch.Tensor:
        whole = x.shape[-1] == term.inputs
        if x.shape[-1] < term.inputs:
            x = F.pad(x, (0, term.inputs - x.shape[-1]))
        if isinstance(term.matrix, torch.Tensor):
            if self.own_rows and whole and term.matrix.shape[0] == term.width:
                return dense_rows.linear(x, term.matrix)
            y = reference.dense_linear(x, term.matrix, term.wide)
        else:
            y = library.linear(x, term.matrix, self.backend)
        return y if y.shape[-1] == term.width else y[..., : term.width]


def finish_linear(
    matrices: list[PackedMatrix | torch.Tensor],
    shards: list[Shard],
    dtype: torch.dtype,
    device: torch.device,
    prefix: str = "",
) -> LoadedLinear:
    """Choose the back end, decode where it wants dense weights, join what can be one matrix.

    `prefix` is the name of the layer.
    """
    row = table.choose(table.Device.of(device))
    terms = []
    for collected, shard in zip(matrices, shards, strict=True):
        matrix, width = collected, shard.local_out
        if isinstance(collected, PackedMatrix) and device.type in row.dense_on_load:
            matrix = library.dequant(collected, dtype, row.name).t()[:width].contiguous()
        terms.append(Term(matrix, width, shard.in_cut.padded))
    joined: list[Term] = []
    for term in terms:
        merged = _join(joined[-1], term) if joined else None
        if merged is None:
            joined.append(term)
        else:
            joined[-1] = merged
    prepared = tuple(_prepared(term, row) for term in joined)
    alike = together.alike(prepared) and all(term.wide is None for term in prepared)
    joint = together.share(prepared, prefix)
    return LoadedLinear(prepared, row.name, joint, dense_rows.in_use(), alike)


def _prepared(term: Term, row: table.BackendRow) -> Term:
    """The term in the layout the back end's kernels read."""
    if isinstance(term.matrix, torch.Tensor):
        return replace(term, wide=reference.widen(term.matrix))
    prepare = getattr(row.load(), "prepare_linear", None)
    return term if prepare is None else replace(term, matrix=prepare(term.matrix))


def _join(left: Term, right: Term) -> Term | None:
    """Both terms as one, or None if they must stay apart."""
    a, b = left.matrix, right.matrix
    width = left.width + right.width
    if left.inputs != right.inputs:
        return None
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return Term(torch.cat([a, b]), width, left.inputs)
    both_packed = isinstance(a, PackedMatrix) and isinstance(b, PackedMatrix)
    if both_packed and left.width == a.out_features and a.joins(b):
        return Term(a.join(b), width, left.inputs)
    return None


class Exl3LinearMethod(LinearMethodBase):
    """Loads and applies one linear layer of which at least one matrix is packed.

    `sources` names the checkpoint module of each sub-matrix, in shard order.
    """

    def __init__(self, facts: Facts, prefix: str, sources: tuple[Source, ...]) -> None:
        self.facts = facts
        self.prefix = prefix
        self.sources = sources

    def create_weights(  # noqa: PLR0913 - vLLM's signature
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register placeholders; nothing is allocated before tensors arrive."""
        free = split_prefix(self.prefix)[1] in FREE_WIDTH
        geometry = layer_geometry(layer, input_size, output_size, free_width=free)
        shards = [
            make_shard(self.facts, part, source)
            for part, source in zip(geometry, self.sources, strict=True)
        ]
        device = torch.empty(0).device
        collector = LinearCollector(shards, self.facts, device, params_dtype)
        collector.attach(layer)
        layer.exl3_collector = collector

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Turn the collected tensors into their final form. Raises FormatError if one is
        missing."""
        collector: LinearCollector = layer.exl3_collector
        shards = list(collector.shards.values())
        matrices = collector.finish()
        kind, device = collector.dtype, collector.device
        layer.exl3 = finish_linear(matrices, shards, kind, device, self.prefix)
        collector.detach(layer)
        del layer.exl3_collector

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        loaded: LoadedLinear = layer.exl3
        gated = together.gated(layer, x) if bias is None else None
        return loaded.apply(x, bias) if gated is None else gated
