"""What the kernel table measures, as data."""

from __future__ import annotations

from dataclasses import dataclass

from glm_exl3.format.layout import Codebook

MCG, MUL1 = Codebook.MCG, Codebook.MUL1
EXPERTS, HIDDEN, TOP_K, LIMIT = 288, 4096, 8, 10.0


@dataclass(frozen=True)
class RoutedCase:
    """288 experts of hidden 4096, eight per token, at several numbers of tokens."""

    bits: int
    codebook: Codebook
    intermediate: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class DenseCase:
    """One k x n matrix at several numbers of tokens."""

    k: int
    n: int
    bits: int
    codebook: Codebook
    tokens: tuple[int, ...]


ROUTED = (
    RoutedCase(4, MCG, 2048, (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096, 8192, 16384)),
    RoutedCase(4, MCG, 1024, (1, 8)),
    RoutedCase(3, MUL1, 2048, (1, 8, 64, 4096)),
)
DENSE = (
    DenseCase(4096, 24576, 4, MCG, (1, 8, 64, 2048, 4096, 8192)),
    DenseCase(8192, 4096, 4, MCG, (1, 8, 64)),
    DenseCase(1536, 16384, 4, MCG, (1, 8, 64)),
    DenseCase(4096, 154880, 6, MCG, (1, 8, 64)),
    DenseCase(4096, 24576, 5, MCG, (8,)),
    DenseCase(4096, 24576, 4, MUL1, (8,)),
    DenseCase(8192, 4096, 4, MUL1, (8,)),
    DenseCase(1536, 16384, 4, MUL1, (8,)),
    DenseCase(4096, 24576, 5, MUL1, (8,)),
    DenseCase(4096, 154880, 6, MUL1, (8,)),
)
# The same products on unquantised bf16 weights, for scale.
BF16_ROUTED = (1024, 4096, 8192, 16384)
BF16_DENSE = ((4096, 24576, (8, 2048, 4096, 8192)),)
