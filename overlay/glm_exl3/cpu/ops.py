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

from glm_exl3.ref import mhc


def init_cpu_memory_env(nodes: list[int]) -> None:
    """Called once per worker: memory is left to the operating system, denormals become zero.

    A decaying KDA state and a peaked softmax are full of denormals, and a product with them is
    many times slower.
    """
    torch.set_flush_denormal(True)


def greedy_argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit per row."""
    return logits.argmax(-1)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> None:
    """RMSNorm of the last dim in fp32; a 2-D weight has one row per outermost index of x."""
    if weight.ndim == 2:
        weight = weight.view(weight.shape[0], *[1] * (x.ndim - 2), weight.shape[1])
    out.copy_(mhc.rms_norm(x, weight, epsilon))


def rotary_embedding(  # noqa: PLR0913, PLR0917 - vLLM's operator
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate heads in place: cache `[positions, rotary]`, cosines then sines."""
    cos, sin = cos_sin_cache[positions.flatten().long()].float().unsqueeze(1).chunk(2, dim=-1)
    sin = -sin if inverse else sin
    for heads in (query, key):
        if heads is None:
            continue
        view = heads.view(positions.numel(), -1, head_size)
        part = view[..., rope_dim_offset : rope_dim_offset + 2 * cos.shape[-1]]
        if is_neox:
            left, right = part.float().chunk(2, dim=-1)
            turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
        else:
            left, right = part[..., ::2].float(), part[..., 1::2].float()
            pairs = [left * cos - right * sin, right * cos + left * sin]
            turned = torch.stack(pairs, dim=-1).flatten(-2)
        part.copy_(turned)


@dataclass(frozen=True)
class _Operator:
    name: str
    schema: str
    function: Callable[..., Any]


OPERATORS = (
    _Operator("init_cpu_memory_env", "(SymInt[] nodes) -> ()", init_cpu_memory_env),
    _Operator("greedy_argmax", "(Tensor logits) -> Tensor", greedy_argmax),
    _Operator(
        "rms_norm", "(Tensor(a!) out, Tensor x, Tensor weight, float epsilon) -> ()", rms_norm
    ),
    _Operator(
        "rotary_embedding",
        "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, SymInt head_size, "
        "Tensor cos_sin_cache, bool is_neox, SymInt rope_dim_offset=0, bool inverse=False) -> ()",
        rotary_embedding,
    ),
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
