"""The plugin's rows as values of vLLM's `--kv-cache-dtype`, and what they do to a layer's spec.

vLLM is told that they are not quantised: it would otherwise view the cache as fp8 and quantise
queries. Only the back ends of this package and of the CPU engine look into the rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from glm_exl3.format.kv import FP8, INT8, VLLM_NAMES, registered_layout


def register() -> None:
    """Make the names known to vLLM's configuration; a second call changes nothing."""
    from vllm.config.cache import is_known_kv_cache_dtype, register_kv_cache_dtype
    from vllm.v1.kv_cache_interface import KVQuantMode

    for layout in (FP8, INT8):
        known_as = VLLM_NAMES[layout.name]
        if is_known_kv_cache_dtype(known_as):
            continue

        class Handler:
            """Opaque bytes."""

            name = known_as

            def torch_dtype(self) -> torch.dtype:
                return torch.uint8

            def quant_mode(self) -> Any:
                return KVQuantMode.NONE

        register_kv_cache_dtype(known_as)(Handler)


def with_rows(spec: Any) -> Any:
    """An MLA layer's cache spec with the row bytes of its layout; others unchanged."""
    layout = registered_layout(spec.cache_dtype_str)
    return spec if layout is None else replace(spec, state_content_bytes=layout.row_bytes)
