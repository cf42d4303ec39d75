"""The MTP block of an EXL3 checkpoint.

It sits behind the last hidden layer and is built as a text model, so the checkpoint's prefix is
mapped to that. vLLM makes `eh_proj` a plain torch layer; where the checkpoint packs it, a
replicated linear layer takes its place before weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.models.glm5next import Glm5NextMTP

from glm_exl3.fused.install import join
from glm_exl3.models import naming
from glm_exl3.models.attention import exl3_config
from glm_exl3.models.glm5next import prepare
from glm_exl3.quant.completeness import Naming
from glm_exl3.quant.config import Exl3Config
from glm_exl3.quant.loading import load_checked

_OPTIONAL = (re.compile(r"^model\.embed_tokens\."), re.compile(r"\.shared_head\.head\."))


def pack_eh_proj(model: Any, config: Exl3Config) -> None:
    """Replace `eh_proj` by a quantised layer where the checkpoint packs it or it is recoded."""
    for index, layer in model.layers.items():
        prefix = f"model.layers.{index}.eh_proj"
        packed = config.packed_sources(prefix, merged=False) is not None
        if not packed and not config.recodes(prefix, merged=False):
            continue
        dense = layer.eh_proj
        layer.eh_proj = ReplicatedLinear(
            dense.in_features,
            dense.out_features,
            bias=False,
            params_dtype=dense.weight.dtype,
            quant_config=config,
            prefix=prefix,
            return_bias=False,
        )


class Exl3Glm5NextMTP(Glm5NextMTP):
    """The multi-token-prediction model."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        prepare(vllm_config)
        config = exl3_config(vllm_config)
        if config is not None:
            config.apply_vllm_mapper(naming.PrefixMapper(naming.LANGUAGE, "model."))
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if config is not None:
            pack_eh_proj(self.model, config)
        join(self.model)

    def _naming(self) -> Naming:
        layers = int(self.config.num_hidden_layers)
        return Naming(
            lambda name: naming.mtp_name(name, layers),
            optional=_OPTIONAL,
            splits_fused=False,
            role="mtp",
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        config = self.quant_config
        facts = config.facts if isinstance(config, Exl3Config) else None
        loaded: set[str] = load_checked(
            self, weights, super().load_weights, facts=facts, naming=self._naming()
        )
        return loaded
