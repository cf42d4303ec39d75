"""The least time a sparse attention call can take, from bytes and products alone.

A call gathers `chosen` rows for every query token. No two tokens share a gather, so prefill reads
rows again for each token, from L2 where the context fits. The products are two: scores and values,
512 wide each. Rates are data-sheet figures; the bound is the largest of the three times.
"""

from __future__ import annotations

from dataclasses import dataclass

LATENT = 512
CHOSEN = 2048 + 15
POOL = 16


@dataclass(frozen=True)
class Machine:
    """Bytes and operations per second; L2 size in bytes."""

    name: str
    memory: float
    cache: float
    products: float
    cache_bytes: float


H200 = Machine("H200", 4.8e12, 5.5e12, 989e12, 50e6)
"""HBM and dense bf16 from NVIDIA's data sheet; L2 read rate of Hopper as published in
micro-benchmarks, a rough figure."""


@dataclass(frozen=True)
class Bound:
    """Microseconds by cause; `us` is the largest."""

    memory_us: float
    cache_us: float
    products_us: float

    @property
    def us(self) -> float:
        return max(self.memory_us, self.cache_us, self.products_us)

    @property
    def cause(self) -> str:
        times = {"HBM": self.memory_us, "L2": self.cache_us, "MMA": self.products_us}
        return max(times, key=lambda name: times[name])


def attention(
    machine: Machine, tokens: int, heads: int, context: int, row_bytes: int, requests: int
) -> Bound:
    """Of `tokens` query tokens over `requests` contexts of `context` tokens."""
    chosen = min(context, CHOSEN)
    gathered = tokens * chosen * row_bytes
    distinct = min(gathered, requests * context * row_bytes)
    queries = 2 * 2 * tokens * heads * LATENT
    products = 2 * 2 * tokens * heads * chosen * LATENT
    return Bound(
        1e6 * (distinct + queries) / machine.memory,
        1e6 * gathered / machine.cache,
        1e6 * products / machine.products,
    )


def scoring(machine: Machine, tokens: int, heads: int, context: int, requests: int) -> Bound:
    """Of the indexer's scores: pools of 132 bytes, 128-wide products, fp32 scores written."""
    pools = context // POOL
    return Bound(
        1e6 * (requests * pools * 132 + tokens * pools * 4) / machine.memory,
        1e6 * tokens * pools * 132 / 4 / machine.cache,
        1e6 * 2 * tokens * heads * pools * 128 / machine.products,
    )
