"""Compile the memory-bound functions of the training step, falling back to eager ones.

Only small pure functions are compiled: a whole-model graph would unroll the chunk loop and compile
for minutes. A function that fails to compile runs eagerly from then on, with one line that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nano import kda, layers, model


def compiled_or_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function, replaced by the plain one at its first failure."""
    compiled = torch.compile(function)
    state = {"use": compiled}

    def call(*arguments: Any) -> Any:
        try:
            return state["use"](*arguments)
        except Exception as error:
            if state["use"] is function or isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"{function.__name__}: not compiled: {str(error)[:300]}", flush=True)
            state["use"] = function
            return function(*arguments)

    return call


HOT = (
    (model, ("hyper_weights", "hyper_mix", "token_losses")),
    (layers, ("expert_activation", "clamped_swiglu", "rms_norm")),
    (kda, ("prepare", "scores")),
)


def compile_hot_functions() -> Callable[[], None]:
    """Replace the hot functions by compiled ones; returns a function that undoes it."""
    torch._dynamo.config.recompile_limit = 32
    plain = [(module, name, getattr(module, name)) for module, names in HOT for name in names]
    for module, name, function in plain:
        setattr(module, name, compiled_or_eager(function))

    def restore() -> None:
        for module, name, function in plain:
            setattr(module, name, function)

    return restore
