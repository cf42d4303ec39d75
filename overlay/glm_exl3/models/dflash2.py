"""The DFlash2 drafter with a quantisation configuration of its own.

A drafter folder names its layers from 0 and without `model.`; vLLM builds them behind the target's
layers. The mapper for that is in force while the model builds its own configuration. The drafter
owns neither embedding nor head unless it ships them; vLLM gives it the target's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM

from glm_exl3.models import naming
from glm_exl3.models.attention import exl3_config
from glm_exl3.quant.completeness import Naming
from glm_exl3.quant.config import name_mapper
from glm_exl3.quant.facts import find_folder, read_facts
from glm_exl3.quant.loading import load_checked
from glm_exl3.quant.startup import prepare_model

_OPTIONAL = tuple(
    re.compile(pattern)
    for pattern in (r"(^|\.)embed_tokens\.", r"^lm_head\.", r"\.mask_embedding$", r"^draft_id")
)
_NAMING = Naming(naming.draft_name, optional=_OPTIONAL, splits_fused=False)


class Exl3DFlash2ForCausalLM(DFlash2Qwen3ForCausalLM):
    """The drafter; its packed matrices load like the target's.

    `guarded`: beside an EXL3 target, a drafter of any format loads under the target's rules.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        prepare_model()
        self.guarded = exl3_config(vllm_config) is not None
        first = vllm_config.model_config.get_total_num_hidden_layers()
        with name_mapper(naming.DraftMapper(first)):
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        config = self.draft_model_config
        facts = read_facts(find_folder(config.model, config.revision)) if self.guarded else None
        load_checked(self, weights, super().load_weights, facts=facts, naming=_NAMING)
