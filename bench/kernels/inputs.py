"""Random packed weights and routings for kernel checks and timings.

Any bit pattern is a valid trellis, so no quantiser is needed: scales of random sign and of size
1/(std * sqrt(k)) give every matrix about unit gain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix

_STD = {Codebook.INST3: 1.24371, Codebook.MCG: 1.24411, Codebook.MUL1: 1.00031}


@dataclass(frozen=True)
class Routed:
    """One call of the routed experts: x [T, H], ids [T, k], weights [T, k]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def random_trellis(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """int16 of `shape` on the generator's device."""
    device = generator.device
    return torch.randint(
        -(1 << 15), 1 << 15, shape, dtype=torch.int16, device=device, generator=generator
    )


def random_scales(shape: tuple[int, ...], size: float, generator: torch.Generator) -> torch.Tensor:
    """fp16 of random sign, magnitudes within a factor of two around `size`."""
    device = generator.device
    spread = torch.rand(shape, device=device, generator=generator) + 0.5
    signs = torch.randint(0, 2, shape, device=device, generator=generator) * 2 - 1
    return (spread * signs * size).to(torch.float16)


def random_matrix(
    k: int, n: int, last_dim: int, codebook: Codebook, generator: torch.Generator
) -> PackedMatrix:
    """k x n weights at K = last_dim / 16."""
    gain = 1.0 / (_STD[codebook] * k**0.5)
    return PackedMatrix(
        random_trellis((k // 16, n // 16, last_dim), generator),
        random_scales((k,), gain, generator),
        random_scales((n,), 1.0, generator),
        codebook,
    )


def random_stack(
    lead: tuple[int, ...],
    k: int,
    n: int,
    last_dim: int,
    codebook: Codebook,
    generator: torch.Generator,
    *,
    same_suh: bool = True,
) -> Exl3Stack:
    """Experts (and gate/up halves) `lead`; with `same_suh` both halves share input scales."""
    gain = 1.0 / (_STD[codebook] * k**0.5)
    suh = random_scales((*lead, k), gain, generator)
    if same_suh and len(lead) == 2:
        suh = suh[:, :1].expand(-1, lead[1], -1).contiguous()
    return Exl3Stack(
        random_trellis((*lead, k // 16, n // 16, last_dim), generator),
        suh,
        random_scales((*lead, n), 1.0, generator),
        codebook,
    )


def random_routing(
    tokens: int,
    hidden: int,
    experts: int,
    top_k: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.bfloat16,
) -> Routed:
    """Independent uniform choices of `top_k` different experts per token."""
    device = generator.device
    noise = torch.rand(tokens, experts, device=device, generator=generator)
    ids = noise.topk(top_k, dim=1).indices.to(torch.int32)
    weights = torch.rand(tokens, top_k, device=device, generator=generator)
    x = torch.randn(tokens, hidden, device=device, generator=generator)
    return Routed(x.to(dtype), ids, weights / weights.sum(1, keepdim=True) * 2.5)
