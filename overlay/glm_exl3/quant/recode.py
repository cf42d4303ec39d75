"""Dense projections that become 8-bit rows when loading ends.

The layer is built and loaded as vLLM builds it, in bf16, so checks and edits see its weight; then
the weight is replaced by its codes. Scales are one per output channel of the whole matrix: where
ranks share its inputs they agree on the row maxima first, which makes every rank's codes those that
one rank alone would have. Nothing here is used unless `GLM_EXL3_DENSE_RECODE` is fp8 or int8.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_tp_weight_quant
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from glm_exl3.log import logger
from glm_exl3.ops import recoded
from glm_exl3.ref.recode import row_maxima

_log = logger(__name__)


def recode_layer(layer: Any, scheme: str, name: str) -> None:
    """Replace the weight of `layer` by its codes; a second call does nothing."""
    weight = layer._parameters.get("weight")
    if weight is None:
        return
    amax = row_maxima(weight.data)
    amax = amax_for_tp_weight_quant(amax, is_sharded(layer))
    layer.exl3_recoded = recoded.encode_rows(weight.data, scheme, amax)
    del layer._parameters["weight"]
    held = layer.exl3_recoded.held_bytes
    _log.debug("%s: %s, %d bytes instead of %d", name, scheme, held, weight.nbytes)


def is_sharded(layer: Any) -> bool:
    """Whether other ranks hold further inputs of the same output channels."""
    whole, own = getattr(layer, "input_size", 0), getattr(layer, "input_size_per_partition", 0)
    return int(getattr(layer, "tp_size", 1)) > 1 and whole != own


class _Recoded:
    """What linear layers and the head have in common once their weight is codes."""

    def __init__(self, scheme: str, prefix: str) -> None:
        self.scheme = scheme
        self.prefix = prefix

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        recode_layer(layer, self.scheme, self.prefix)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., k] -> [..., outputs of this rank] in x.dtype."""
        matrix: recoded.RowCodes = layer.exl3_recoded
        y = recoded.linear(x, matrix)
        return y if bias is None else y + bias


class RecodedLinearMethod(_Recoded, LinearMethodBase):
    """A linear layer of 8-bit rows."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """As vLLM does it without quantisation."""
        UnquantizedLinearMethod().create_weights(layer, *args, **kwargs)


class RecodedHeadMethod(_Recoded, QuantizeMethodBase):
    """The head in 8-bit rows; every rank has all inputs of its range of the vocabulary."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """As vLLM does it without quantisation."""
        UnquantizedEmbeddingMethod().create_weights(layer, *args, **kwargs)
