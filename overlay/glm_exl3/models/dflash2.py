"""The DFlash2 drafter with a quantisation configuration of its own.

A drafter folder names its layers from 0 and without `model.`; vLLM builds them behind the target's
layers. The mapper for that is in force while the model builds its own configuration. The drafter
owns neither embedding nor head unless it ships them; vLLM gives it the target's.

A packed drafter keeps its key and value projections BF16, since vLLM computes those of all layers
with one product for every token of the context. vLLM decides for that product before packed layers
are finished and sees quantised ones; `fuse_context` gives it back afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from vllm.config import replace as replace_config
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM

from glm_exl3.format.drafting import Pair, cache_problem, dflash_problems
from glm_exl3.format.headers import read_object
from glm_exl3.format.kv import registered_layout
from glm_exl3.log import logger
from glm_exl3.models import naming
from glm_exl3.models.attention import exl3_config
from glm_exl3.quant.completeness import Naming
from glm_exl3.quant.config import name_mapper
from glm_exl3.quant.facts import find_folder, read_facts
from glm_exl3.quant.linear import Exl3LinearMethod, LoadedLinear
from glm_exl3.quant.loading import load_checked
from glm_exl3.quant.startup import prepare_model

_log = logger(__name__)
_OPTIONAL = tuple(
    re.compile(pattern)
    for pattern in (r"(^|\.)embed_tokens\.", r"^lm_head\.", r"\.mask_embedding$", r"^draft_id")
)
_NAMING = Naming(naming.draft_name, optional=_OPTIONAL, splits_fused=False, role="draft")


def check_pair(vllm_config: Any) -> None:
    """Raise GlmExl3Error when this drafter cannot draft for this target."""
    from vllm.platforms import current_platform

    speculation, target = vllm_config.speculative_config, vllm_config.model_config
    model = speculation.draft_model_config
    folder = find_folder(model.model, model.revision)
    text = {
        "hidden_size": target.get_hidden_size(),
        "vocab_size": target.get_vocab_size(),
        "num_hidden_layers": target.get_total_num_hidden_layers(),
    }
    pair = Pair(
        text,
        read_object(folder / "config.json"),
        speculation.num_speculative_tokens,
        vllm_config.parallel_config.tensor_parallel_size,
    )
    device = current_platform.get_device_capability() if current_platform.is_cuda() else None
    cache = cache_problem(
        str(speculation.kv_cache_dtype or vllm_config.cache_config.cache_dtype),
        graphs=not target.enforce_eager,
        capability=device and device.major,
    )
    for found in (*dflash_problems(pair), *([cache] if cache else [])):
        raise found


def with_plain_cache(vllm_config: Any) -> Any:
    """The configuration with the drafter's own cache type where the target's rows are latents."""
    cache = vllm_config.cache_config
    if registered_layout(str(cache.cache_dtype)) is None:
        return vllm_config
    return replace_config(vllm_config, cache_config=replace_config(cache, cache_dtype="auto"))


def context_part(layer: Any, query_width: int) -> torch.Tensor | None:
    """The key and value rows [n, k] of a finished `qkv_proj`, None where they are packed."""
    loaded: LoadedLinear = layer.exl3
    first, *rest = loaded.terms
    if not rest:
        whole = first.matrix
        return whole[query_width:] if isinstance(whole, torch.Tensor) else None
    dense = [term.matrix for term in rest]
    if first.width != query_width or not all(isinstance(m, torch.Tensor) for m in dense):
        return None
    return torch.cat(dense)


def fuse_context(model: Any) -> None:
    """Give vLLM the key and value weights of all layers as one matrix, where they are dense.

    Where a layer's key and value rows are one term of their own, they become a view of the matrix.
    """
    layers = [layer.self_attn for layer in model.layers]
    if not all(isinstance(one.qkv_proj.quant_method, Exl3LinearMethod) for one in layers):
        return
    found = [context_part(one.qkv_proj, one.q_size) for one in layers]
    parts = [part for part in found if part is not None]
    if len(parts) < len(layers):
        _log.info("packed key and value projections: the context is projected layer by layer")
        return
    fused = torch.cat(parts)
    biases = [one.qkv_proj.bias for one in layers]
    model._fused_kv_weight = fused
    model._fused_kv_bias = (
        torch.cat([bias[one.q_size :] for bias, one in zip(biases, layers, strict=True)])
        if biases[0] is not None
        else None
    )
    for one, rows in zip(layers, fused.split([len(part) for part in parts]), strict=True):
        loaded: LoadedLinear = one.qkv_proj.exl3
        first, *rest = loaded.terms
        if len(rest) == 1 and rest[0].wide is None:
            view = replace(rest[0], matrix=rows)
            one.qkv_proj.exl3 = replace(loaded, terms=(first, view))


class Exl3DFlash2ForCausalLM(DFlash2Qwen3ForCausalLM):
    """The drafter; its packed matrices load like the target's.

    `guarded`: beside an EXL3 target, a drafter of any format loads under the target's rules.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        prepare_model()
        vllm_config = with_plain_cache(vllm_config)
        check_pair(vllm_config)
        self.guarded = exl3_config(vllm_config) is not None
        first = vllm_config.model_config.get_total_num_hidden_layers()
        with name_mapper(naming.DraftMapper(first)):
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        config = self.draft_model_config
        facts = read_facts(find_folder(config.model, config.revision)) if self.guarded else None
        load_checked(self, weights, super().load_weights, facts=facts, naming=_NAMING)

    def process_weights_after_loading(self) -> None:
        """vLLM's hook behind the last layer's own."""
        fuse_context(self.model)
