"""Let a request keep its blocks out of the prefix cache.

vLLM has a field for not reading the cache and a salt that separates users, but none for not
storing. `glm_exl3.kvcache.storing` says what a request has to ask for; the patch leaves out the
registration of its blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from glm_exl3.patches.record import Patch, wrap

CACHE = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks"


def apply() -> None:
    """Wrap the one method through which blocks of a request are registered."""
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    from glm_exl3.kvcache.storing import stores

    def unless_refused(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None:
            if stores(request):
                original(self, request, num_computed_tokens)

        return cache_blocks

    wrap("no-store", KVCacheCoordinator, "cache_blocks", unless_refused)


PATCH = Patch(
    id="no-store",
    summary="a request with vllm_xargs store_prefix=0 leaves nothing in the prefix cache",
    targets=(CACHE,),
    stage="import",
    applies_to="==0.33.0",
    fingerprints={"0.33.0": {CACHE: "02c2696dcbfa9635"}},
    upstream="none: no field for it in 0.33",
    remove_when="vLLM has a request field that keeps blocks out of the prefix cache",
    off_switch="GLM_EXL3_PATCH_NO_STORE",
    risk="speed: a request that should be stored would not be",
    apply=apply,
)
