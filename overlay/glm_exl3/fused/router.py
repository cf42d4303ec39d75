"""Gate and expert selection of a decode step in one launch.

What: `ref.router.route`. Every program multiplies all tokens with a few rows of the gate; the one
that arrives last at the counter reads the logits back, applies the sigmoid and the correction bias
and picks the experts of all tokens, so the result does not depend on who was last.

Not measured on a GPU yet (`python -m e2e.router`).

What must stay true: the counter is zero between launches (the last program resets it), and one
counter serves one stream at a time. An id is always that of an expert, also when a logit is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917 - Triton code is untyped

MAX_TOKENS = 8
MAX_EXPERTS = 1024
EXPERTS_AT_ONCE = 2
WARPS = 4


@triton.jit
def _select(
    logits, bias, weights_out, ids_out, tokens, scale, EXPERTS, TOKENS: tl.constexpr,
    LANES: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    t, lane, slot = tl.arange(0, TOKENS), tl.arange(0, LANES), tl.arange(0, SLOTS)
    there = (t[:, None] < tokens) & (lane[None, :] < EXPERTS)
    at = logits + t[:, None] * EXPERTS + lane[None, :]
    scores = tl.sigmoid(tl.load(at, mask=there, other=0.0, cache_modifier=".cg"))
    correction = tl.load(bias + lane, mask=lane < EXPERTS, other=0.0)
    choice = tl.where(lane[None, :] < EXPERTS, scores + correction[None, :], float("-inf"))
    kept = tl.zeros((TOKENS, SLOTS), tl.float32)
    ids = tl.zeros((TOKENS, SLOTS), tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.max(choice, axis=1)
        found = tl.min(tl.where(choice == best[:, None], lane[None, :], EXPERTS - 1), axis=1)
        mine = lane[None, :] == found[:, None]
        value = tl.sum(tl.where(mine, scores, 0.0), axis=1)
        kept = tl.where(slot[None, :] == place, value[:, None], kept)
        ids = tl.where(slot[None, :] == place, found[:, None], ids)
        choice = tl.where(mine, float("-inf"), choice)
    kept = kept / tl.sum(kept, axis=1)[:, None] * scale
    out = t[:, None] * TOP_K + slot[None, :]
    filled = (t[:, None] < tokens) & (slot[None, :] < TOP_K)
    tl.store(weights_out + out, kept, mask=filled)
    tl.store(ids_out + out, ids, mask=filled)


@triton.jit
def _route_kernel(
    x,
    weight,
    bias,
    logits,
    weights_out,
    ids_out,
    counter,
    tokens,
    row_stride,
    scale,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_AT_ONCE: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
):
    experts = tl.program_id(0) * EXPERTS_AT_ONCE + tl.arange(0, EXPERTS_AT_ONCE)
    k = tl.arange(0, HIDDEN)
    there = experts < EXPERTS
    rows = weight + experts[:, None].to(tl.int64) * HIDDEN + k[None, :]
    tile = tl.load(rows, mask=there[:, None], other=0.0).to(tl.float32)
    for token in range(tokens):
        row = tl.load(x + token * row_stride + k).to(tl.float32)
        products = tl.sum(tile * row[None, :], axis=1)
        tl.store(logits + token * EXPERTS + experts, products, mask=there)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counter, 0)
        _select(
            logits, bias, weights_out, ids_out, tokens, scale, EXPERTS, TOKENS, LANES, TOP_K, SLOTS
        )  # fmt: skip


@dataclass(frozen=True)
class Routing:
    """What a step of `T` tokens is routed by."""

    logits: Tensor
    """fp32 `[T, E]`"""
    weights: Tensor
    """fp32 `[T, top_k]`"""
    ids: Tensor
    """int32 `[T, top_k]`"""


@cache
def counter(device: torch.device) -> Tensor:
    """The arrival counter of a device, zero between launches."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel is made for tokens `[T, H]` and a gate `[E, H]` like these."""
    hidden = x.shape[-1]
    return (
        bias is not None
        and bias.dtype is torch.float32
        and 0 < x.shape[0] <= MAX_TOKENS
        and x.dtype is torch.bfloat16
        and x.stride(-1) == 1
        and weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and weight.shape[0] <= MAX_EXPERTS
        and hidden & (hidden - 1) == 0
    )


def route(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float) -> Routing:
    """x bf16 `[T, H]`, gate weight bf16 `[E, H]`, correction bias fp32 `[E]`, all on one device."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=x.device)
    _route_kernel[triton.cdiv(experts, EXPERTS_AT_ONCE),](
        x,
        weight,
        bias,
        logits,
        weights,
        ids,
        counter(x.device),
        tokens,
        x.stride(0),
        scale,
        HIDDEN=hidden,
        EXPERTS=experts,
        EXPERTS_AT_ONCE=EXPERTS_AT_ONCE,
        TOKENS=triton.next_power_of_2(tokens),
        LANES=triton.next_power_of_2(experts),
        TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k),
        num_warps=WARPS,
    )
    return Routing(logits, weights, ids)
