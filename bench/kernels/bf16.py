"""The same products on unquantised bf16 weights: torch's grouped product and cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernels.cases import BF16_DENSE, BF16_ROUTED, EXPERTS, HIDDEN, TOP_K
from kernels.timing import median_us


@dataclass(frozen=True)
class Reference:
    """One product on bf16 weights; `us` microseconds."""

    op: str
    shape: str
    m: int
    us: float
    tflops: float


def _random(*shape: int, generator: torch.Generator) -> torch.Tensor:
    made = torch.empty(*shape, dtype=torch.bfloat16, device="cuda")
    return made.normal_(generator=generator)


def _both(
    x: torch.Tensor,
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """Gate with up, then down, without the activation between them."""
    torch._grouped_mm(x, w13, offs=ends)
    torch._grouped_mm(hidden, w2, offs=ends)


def routed(intermediate: int = 2048) -> Iterator[Reference]:
    generator = torch.Generator("cuda").manual_seed(5)
    w13 = _random(EXPERTS, 2 * intermediate, HIDDEN, generator=generator).transpose(1, 2)
    w2 = _random(EXPERTS, HIDDEN, intermediate, generator=generator).transpose(1, 2)
    for m in BF16_ROUTED:
        noise = torch.rand(m, EXPERTS, device="cuda", generator=generator)
        ids = noise.topk(TOP_K, dim=1).indices.flatten()
        ends = torch.bincount(ids, minlength=EXPERTS).cumsum(0).to(torch.int32)
        x = _random(m * TOP_K, HIDDEN, generator=generator)
        hidden = _random(m * TOP_K, intermediate, generator=generator)
        us = median_us([partial(_both, x, hidden, w13, w2, ends)], 7)
        flop = 6.0 * m * TOP_K * HIDDEN * intermediate
        shape = f"{EXPERTS}x{HIDDEN}x{intermediate}"
        yield Reference("moe", shape, m, round(us, 2), round(flop / us / 1e6, 1))


def dense() -> Iterator[Reference]:
    generator = torch.Generator("cuda").manual_seed(6)
    for k, n, tokens in BF16_DENSE:
        weight = _random(k, n, generator=generator)
        for m in tokens:
            x = _random(m, k, generator=generator)
            us = median_us([partial(torch.matmul, x, weight)], 7)
            tflops = round(2.0 * m * k * n / us / 1e6, 1)
            yield Reference("linear", f"{k}x{n}", m, round(us, 2), tflops)
