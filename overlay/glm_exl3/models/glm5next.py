"""GLM-5.3-Flash from EXL3 checkpoints: vLLM's classes under their own architecture names.

The names stay, because vLLM keys graph capture and hybrid-cache rules by them. Three things are
added: ranks are compared before anything is built, weights load under the rules of `quant.loading`,
and layers are steered where a vector is set. Checkpoints of another quantisation pass through
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.models.utils import PPMissingLayer, StageMissingLayer
from vllm.models.glm5next import Glm5NextForCausalLM, Glm5NextForConditionalGeneration

from glm_exl3.fused.install import join
from glm_exl3.models import naming, steer
from glm_exl3.models.attention import exl3_config
from glm_exl3.quant.ablit import check_registered
from glm_exl3.quant.completeness import Naming, Taker
from glm_exl3.quant.loading import load_checked
from glm_exl3.quant.startup import compare_digests, prepare_model
from glm_exl3.quant.together import join_activations


def prepare(vllm_config: Any) -> None:
    """What must happen before a model with EXL3 weights is built. Raises GlmExl3Error."""
    prepare_model()
    check_registered(vllm_config.model_config.hf_text_config)
    if exl3_config(vllm_config) is not None:
        compare_digests(get_tp_group())


def text_naming(model: Any) -> Naming:
    """Naming of the flat text model."""
    layers = int(model.config.num_hidden_layers)
    sibling = naming.like_mtp(model.config)

    def to_vllm(name: str) -> str | None:
        return None if naming.is_mtp(name, layers) else naming.text_name(name)

    def knows(name: str, taker: Taker) -> bool:
        like = naming.mtp_sibling(name, sibling)
        return like is None or taker(like)

    return Naming(to_vllm, knows)


class Exl3Glm5NextForCausalLM(Glm5NextForCausalLM):
    """The text model, alone or inside the composite model."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        if not prefix:
            prepare(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        join(self.model)
        join_activations(self.model)
        steer.install(self.model)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        config = exl3_config(self.vllm_config)
        facts = None if config is None else config.facts
        loaded: set[str] = load_checked(
            self, weights, super().load_weights, facts=facts, naming=text_naming(self)
        )
        return loaded


class Exl3Glm5NextForConditionalGeneration(Glm5NextForConditionalGeneration):
    """Vision tower and language model."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        prepare(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def _naming(self) -> Naming:
        text = self.config.text_config
        layers, sibling = int(text.num_hidden_layers), naming.like_mtp(text)
        blind = isinstance(self.visual, (StageMissingLayer, PPMissingLayer))
        tower = naming.tower_modules(self.config.vision_config) if blind else frozenset()

        def to_vllm(name: str) -> str | None:
            skipped = naming.is_mtp(name, layers) or (blind and name.startswith(naming.VISION))
            return None if skipped else naming.composite_name(name)

        def knows(name: str, taker: Taker) -> bool:
            if name.startswith(naming.VISION):
                return name.rpartition(".")[0] in tower
            like = naming.mtp_sibling(name, sibling)
            return like is None or taker(f"language_model.{like}")

        return Naming(to_vllm, knows)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        config = exl3_config(self.language_model.vllm_config)
        facts = None if config is None else config.facts
        loaded: set[str] = load_checked(
            self, weights, super().load_weights, facts=facts, naming=self._naming()
        )
        return loaded
