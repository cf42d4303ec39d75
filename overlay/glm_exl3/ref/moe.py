"""Routed experts on packed stacks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from glm_exl3.format.layout import Codebook
from glm_exl3.ref.linear import exl3_linear


@dataclass(frozen=True)
class Exl3Stack:
    """The experts of one rank for one projection, or for gate and up together.

    trellis int16 [E, k/16, n/16, 16K], suh fp16 [E, k], svh fp16 [E, n]; gate and up together carry
    an extra dimension of 2 behind E, gate first.
    """

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: Codebook


def swiglu_clamped(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """silu(gate) * up, gate clamped to at most `limit` and up to +-`limit` before the silu."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def exl3_moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: Exl3Stack,
    w2: Exl3Stack,
    limit: float | None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over the chosen experts of weight * down(swiglu(gate(x), up(x))).

    x [T, H], topk_ids int [T, k] (global ids), topk_weights [T, k] -> [T, H] in x.dtype.
    `expert_map` [global experts] gives the local index or -1; experts of other ranks add nothing.
    """
    work = torch.float64 if x.dtype is torch.float64 else torch.float32
    local = topk_ids.to(torch.int64)
    if expert_map is not None:
        local = expert_map.to(torch.int64)[local]
    out = torch.zeros(x.shape, dtype=work, device=x.device)
    for expert in torch.unique(local).tolist():
        if expert < 0:
            continue
        tokens, slots = torch.where(local == expert)
        chosen = x[tokens].to(work)
        gate, up = (
            exl3_linear(
                chosen, w13.trellis[expert, i], w13.suh[expert, i], w13.svh[expert, i], w13.codebook
            )
            for i in (0, 1)
        )
        hidden = swiglu_clamped(gate, up, limit)
        down = exl3_linear(hidden, w2.trellis[expert], w2.suh[expert], w2.svh[expert], w2.codebook)
        out.index_add_(0, tokens, down * topk_weights[tokens, slots, None].to(work))
    return out.to(x.dtype)
