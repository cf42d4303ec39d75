"""Run vLLM's own Triton kernels under Triton's interpreter beside ours, on the same inputs.

A case calls vLLM's function and ours on equal inputs and returns what both returned and wrote. The
interpreter has to be chosen before Triton is imported, hence the environment first.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

os.environ |= {
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "GLM_EXL3_PLATFORM": "off",
    "TORCHDYNAMO_DISABLE": "1",
}

import torch

from glm_exl3.cpu import torchvision

torchvision.prepare()

Case = Callable[[], tuple[Any, Any]]
CASES: dict[str, Case] = {}


def prepare_interpreter() -> None:
    """Let the interpreter run two things it rejects: scalar masks and aliased builtins."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        original = getattr(InterpreterBuilder, name)

        def wrapped(self: Any, *args: Any, _original: Any = original, _at: int = position) -> Any:
            args[_at].data = np.asarray(args[_at].data).astype(np.bool_)
            return _original(self, *args)

        setattr(InterpreterBuilder, name, wrapped)


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def both(theirs: Callable, ours: Callable, make: Callable[[], dict[str, Any]]) -> tuple[Any, Any]:
    """Call both on equal inputs; outputs are what they return and every input afterwards."""
    results = []
    for function in (theirs, ours):
        arguments = make()
        returned = function(**arguments)
        tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
        for value in arguments.values():
            if isinstance(value, types.SimpleNamespace):
                tensors += [x for x in vars(value).values() if isinstance(x, torch.Tensor)]
        results.append((returned, tensors))
    return results[0], results[1]


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in flat(part)]
    return []


def same(theirs: Any, ours: Any) -> bool:
    left, right = flat(theirs), flat(ours)
    return len(left) == len(right) and all(
        torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
        for a, b in zip(left, right, strict=True)
    )


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int32) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator, dtype=dtype)
