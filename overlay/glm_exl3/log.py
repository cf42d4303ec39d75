"""Loggers of the plugin.

They live under `vllm.`, so vLLM's own handlers, levels and rank prefixes apply without importing
vLLM here.
"""

from __future__ import annotations

import logging

ROOT = "vllm.glm_exl3"


def logger(module: str) -> logging.Logger:
    """The logger for a module of this package, given its `__name__`."""
    return logging.getLogger(f"{ROOT}.{module.removeprefix('glm_exl3.')}")
