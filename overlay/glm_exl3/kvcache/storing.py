"""Requests that leave nothing behind in the prefix cache.

A batch of one-off prompts pushes idle conversations out of the pool. A request opts out with
`"vllm_xargs": {"store_prefix": 0}` in its body: it still reads the cache, but none of its blocks is
registered, so they are the first to be used again once it ends.
"""

from __future__ import annotations

from typing import Any

ARGUMENT = "store_prefix"


def stores(request: Any) -> bool:
    """Whether the blocks of this request may be registered for others to find."""
    parameters = getattr(request, "sampling_params", None)
    extra = getattr(parameters, "extra_args", None) or {}
    return str(extra.get(ARGUMENT, 1)).strip().lower() not in {"0", "0.0", "false", "no", "off"}
