"""Operators of vLLM's CPU build that its CUDA build lacks, in plain torch.

Only what the engine reaches is here; each is defined only where absent, because defining an
operator that a library registers later aborts the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def init_cpu_memory_env(nodes: list[int]) -> None:
    """Bind memory to NUMA nodes: left to the operating system."""


def greedy_argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit per row."""
    return logits.argmax(-1)


@dataclass(frozen=True)
class _Operator:
    name: str
    schema: str
    function: Callable[..., Any]


OPERATORS = (
    _Operator("init_cpu_memory_env", "(SymInt[] nodes) -> ()", init_cpu_memory_env),
    _Operator("greedy_argmax", "(Tensor logits) -> Tensor", greedy_argmax),
)
_libraries: list[torch.library.Library] = []


def define_missing() -> None:
    """Define every operator of `OPERATORS` that `torch.ops._C` does not have."""
    if _libraries:
        return
    library = torch.library.Library("_C", "FRAGMENT")
    _libraries.append(library)
    for operator in OPERATORS:
        if not hasattr(torch.ops._C, operator.name):
            library.define(operator.name + operator.schema)
            library.impl(operator.name, operator.function, "CompositeExplicitAutograd")
