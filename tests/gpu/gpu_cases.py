"""Helpers of the GPU tests."""

from __future__ import annotations

import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix
from glm_exl3.ref.linear import exl3_linear
from glm_exl3.ref.moe import exl3_moe
from kernels.inputs import Routed, random_stack

MCG, MUL1, INST3 = Codebook.MCG, Codebook.MUL1, Codebook.INST3
LINEAR_TOLERANCE, MOE_TOLERANCE = 3e-3, 5e-3
FAST_RATES = [(c, 16 * k) for c in (MCG, MUL1) for k in (2, 3, 4, 5, 6)]
ALL_RATES = [(c, 16 * k) for c in Codebook for k in range(1, 9)] + [(MUL1, d) for d in (24, 40, 56)]
OTHER_RATES = [rate for rate in ALL_RATES if rate not in FAST_RATES]
LIMIT = 10.0


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative Frobenius error; NaN never passes a comparison."""
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm())


def linear_in_double(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    return exl3_linear(x.double(), matrix.trellis, matrix.suh, matrix.svh, matrix.codebook)


def tokens_of(count: int, k: int, generator: torch.Generator, dtype=torch.bfloat16):
    return torch.randn(count, k, device="cuda", generator=generator).to(dtype)


def run_moe(backend, call: Routed, w13: Exl3Stack, w2: Exl3Stack, limit=LIMIT, expert_map=None):
    """The back end's routed experts on stacks as they are loaded."""
    prepared = backend.prepare_moe(w13, w2)
    return backend.moe(call.x, call.ids, call.weights, *prepared, limit, expert_map)


def moe_in_double(
    call: Routed,
    w13: Exl3Stack,
    w2: Exl3Stack,
    limit: float | None = LIMIT,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    return exl3_moe(call.x.double(), call.ids, call.weights, w13, w2, limit, expert_map)


def random_stacks(
    generator: torch.Generator,
    experts: int,
    hidden: int,
    intermediate: int,
    last_dim: int,
    codebook: Codebook,
    *,
    same_suh: bool = True,
) -> tuple[Exl3Stack, Exl3Stack]:
    """Gate/up [E, 2, ..] and down [E, ..] with trellis of `last_dim` values a tile row."""
    w13 = random_stack(
        (experts, 2), hidden, intermediate, last_dim, codebook, generator, same_suh=same_suh
    )
    return w13, random_stack((experts,), intermediate, hidden, last_dim, codebook, generator)
