"""Give the drafter's sliding window prefix hits that end inside a block.

A drafter with a window (DFlash2) adds a sliding-window group to the cache. vLLM lands prefix hits
below the block only if every group's manager can, and its sliding-window manager cannot: with it, a
follow-up turn re-reads up to a block of 3,072-5,120 tokens. The layer's spec is replaced by an
equal one under `glm_exl3.kvcache.window`; no byte of the cache changes place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from glm_exl3.patches.record import Patch, wrap

SPEC = "vllm.model_executor.layers.attention.attention:Attention.get_kv_cache_spec"
WINDOW = "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager"
TAIL = "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager._cache_partial_tail_block"
STORE = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks"


def apply() -> None:
    """Wrap the method by which an attention layer states its cache."""
    from vllm.model_executor.layers.attention.attention import Attention

    def refined(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
            from glm_exl3.kvcache.window import refine

            return refine(original(self, vllm_config))

        return get_kv_cache_spec

    wrap("fine-window", Attention, "get_kv_cache_spec", refined)


PATCH = Patch(
    id="fine-window",
    summary="prefix hits end inside a block although the drafter has a sliding window",
    targets=(SPEC, WINDOW, TAIL, STORE),
    stage="model",
    applies_to="==0.33.0",
    fingerprints={
        "0.33.0": {
            SPEC: "681dbb12d3cccb82",
            WINDOW: "4fe727a472834960",
            TAIL: "c41eb360c7806b14",
            STORE: "7fb90840a3eabccc",
        }
    },
    upstream="none: vLLM's sliding-window manager looks up whole blocks only",
    remove_when="SlidingWindowManager.supports_fine_grained_hash_lookup is true",
    off_switch="GLM_EXL3_PATCH_FINE_WINDOW",
    risk="wrong-output: a hit without its window lowers what the drafter's tokens are worth; the "
    "target's answers do not depend on it",
    apply=apply,
)
