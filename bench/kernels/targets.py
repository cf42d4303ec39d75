"""The times the kernels are held to, in microseconds, and what each is derived from.

Absolute targets are three quarters of the higher of two limits, bandwidth and decode arithmetic.
Relative ones compare rows of one run: mul1 with mcg, dense products and experts with bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Key = tuple[str, str, int, int, str]  # op, shape, tokens, K, codebook

_EXPERTS = "288x4096x2048"
ABSOLUTE: dict[tuple[str, str, int, str], dict[int, float]] = {
    ("moe", _EXPERTS, 4, "mcg"): {
        **{1: 45, 2: 90, 4: 173, 8: 328, 16: 600, 32: 960, 64: 1350, 256: 1620},
        **{1024: 2300, 4096: 5000},
    },
    ("moe", "288x4096x1024", 4, "mcg"): {1: 24, 8: 165},
    ("moe", _EXPERTS, 3, "mul1"): {1: 60, 8: 420, 64: 1900, 4096: 5400},
    ("linear", "4096x24576", 4, "mcg"): {1: 25, 8: 25},
    ("linear", "8192x4096", 4, "mcg"): {1: 10, 8: 10},
    ("linear", "1536x16384", 4, "mcg"): {1: 8, 8: 8},
    ("linear", "4096x154880", 6, "mcg"): {1: 190, 8: 190},
}
TFLOPS: dict[Key, float] = {("moe", _EXPERTS, 8192, 4, "mcg"): 400.0}
MUL1_OVER_MCG = 1.25
DENSE_OVER_BF16 = 1.25
# Experts: faster than bf16 below 2,048 tokens, then at most so much slower.
_EXPERTS_OVER_BF16 = ((2047, 1.0), (4096, 1.15), (1 << 30, 1.45))


@dataclass(frozen=True)
class Target:
    """At most `us`, because of `why`."""

    us: float
    why: str


def experts_over_bf16(tokens: int) -> float:
    """How much longer than bf16 experts `tokens` tokens may take."""
    return next(ratio for most, ratio in _EXPERTS_OVER_BF16 if tokens <= most)


def targets(
    key: Key, flop: float, ours: Mapping[Key, float], bf16: Mapping[tuple[str, str, int], float]
) -> list[Target]:
    """All targets of a row. `ours` holds the rows of the run, `bf16` its references by op, shape
    and tokens, both in microseconds; `flop` counts the row's multiply-adds twice."""
    op, shape, tokens, bits, codebook = key
    found = []
    absolute = ABSOLUTE.get((op, shape, bits, codebook), {}).get(tokens)
    if absolute is not None:
        found.append(Target(absolute, "limit"))
    if key in TFLOPS:
        found.append(Target(flop / TFLOPS[key] / 1e6, f"{TFLOPS[key]:.0f} TFLOP/s"))
    other = ours.get((op, shape, tokens, bits, "mcg"))
    if op == "linear" and codebook == "mul1" and other is not None:
        found.append(Target(MUL1_OVER_MCG * other, f"{MUL1_OVER_MCG}x mcg"))
    reference = bf16.get((op, shape, tokens))
    if reference is None:
        return found
    if op == "moe":
        ratio = experts_over_bf16(tokens)
        found.append(Target(ratio * reference, f"{ratio}x bf16"))
    elif tokens >= 2048:
        found.append(Target(DENSE_OVER_BF16 * reference, f"{DENSE_OVER_BF16}x bf16"))
    return found
