"""The packed `lm_head` under vLLM's vocabulary cut.

vLLM gives each rank an equal range of a vocabulary padded to multiples of 64, and its logits code
relies on that range. Packed columns can only be cut between 128-blocks. Each rank therefore holds
the blocks that cover its range, at most one more on either side, and slices the product: every
logit is exact, neighbouring ranks compute a shared block twice, and nothing outside this file
changes. Columns behind the stored matrix (vLLM's padding) get zero scales, so their logits are zero
and are cut off by vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from glm_exl3.format.layout import HADAMARD
from glm_exl3.format.sharding import Cut
from glm_exl3.ops import reference
from glm_exl3.ops.matrix import PackedMatrix
from glm_exl3.quant.facts import Facts
from glm_exl3.quant.linear import LoadedLinear, Term, finish_linear
from glm_exl3.quant.names import Source
from glm_exl3.quant.params import LinearCollector
from glm_exl3.quant.shards import Geometry, Shard


@dataclass(frozen=True)
class VocabularyCut:
    """Covering blocks of one rank: stored columns, width with padding, and where its range
    starts."""

    blocks: Cut
    skip: int
    width: int


def cover(start: int, width: int, stored: int) -> VocabularyCut:
    """The 128-blocks that cover [start, start + width) of a matrix with `stored` columns."""
    first = start // HADAMARD * HADAMARD
    last = -(-(start + width) // HADAMARD) * HADAMARD
    inside = (min(first, stored), min(last, stored))
    return VocabularyCut(Cut(*inside, last - first), start - first, width)


class Exl3LMHeadMethod(QuantizeMethodBase):
    """Loads and applies a packed `lm_head`."""

    def __init__(self, facts: Facts, source: Source) -> None:
        self.facts = facts
        self.source = source

    def create_weights(  # noqa: PLR0913 - vLLM's signature
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register placeholders for the blocks that cover this rank's vocabulary range."""
        layout = self.facts.modules[self.source.module]
        hidden, vocabulary = int(layer.embedding_dim), int(layer.org_vocab_size)
        padded = -(-vocabulary // HADAMARD) * HADAMARD
        if layout.in_features != hidden or layout.out_features not in (vocabulary, padded):
            raise self.facts.error(
                f"{self.source.module}.trellis",
                code="shape",
                seen=f"stores {layout.in_features} x {layout.out_features} features, the model "
                f"needs {hidden} x {vocabulary}",
                why="configuration and checkpoint do not belong together",
                fix="use the config.json that was stored with these weights",
            )
        start = int(layer.shard_indices.padded_org_vocab_start_index)
        width = output_partition_sizes[0]
        cut = cover(start, width, layout.out_features)
        shard = Shard(
            Geometry(None, hidden, layout.out_features, cut=1),
            self.source,
            layout,
            Cut(0, hidden, hidden),
            cut.blocks,
        )
        device = torch.empty(0).device
        layer.exl3_cut = cut
        layer.exl3_collector = LinearCollector([shard], self.facts, device, params_dtype)
        layer.exl3_collector.attach(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Turn the collected tensors into their final form. Raises FormatError if one is
        missing."""
        collector: LinearCollector = layer.exl3_collector
        shards = list(collector.shards.values())
        cut: VocabularyCut = layer.exl3_cut
        loaded = finish_linear(collector.finish(), shards, collector.dtype, collector.device)
        layer.exl3, layer.exl3_skip = _without_skip(loaded, cut)
        collector.detach(layer)
        del layer.exl3_collector

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [..., vocabulary range of this rank]."""
        cut: VocabularyCut = layer.exl3_cut
        y: torch.Tensor = layer.exl3.apply(x, None)
        if y.shape[-1] != cut.width:
            y = y[..., layer.exl3_skip : layer.exl3_skip + cut.width].contiguous()
        return y if bias is None else y + bias


def _without_skip(loaded: LoadedLinear, cut: VocabularyCut) -> tuple[LoadedLinear, int]:
    """Drop the rows outside the range of a dense matrix; a packed one keeps its whole blocks."""
    matrix = loaded.terms[0].matrix
    if isinstance(matrix, PackedMatrix):
        return loaded, cut.skip
    rows = F.pad(matrix, (0, 0, 0, max(0, cut.skip + cut.width - matrix.shape[0])))
    rows = rows[cut.skip : cut.skip + cut.width].contiguous()
    term = Term(rows, cut.width, loaded.terms[0].inputs, reference.widen(rows))
    return LoadedLinear((term,), loaded.backend), 0
