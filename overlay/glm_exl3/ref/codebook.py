"""The three codebooks: 16-bit state -> fp16 weight.

3inst and mcg hash the state with a multiplication, mask the word into two fp16 numbers of magnitude
0.125..2 and add them. mul1 sums the four bytes of the product and maps the sum through one fp16
fused multiply-add, as GPUs do; the affine form without that rounding differs by up to 0.0018.
"""

from __future__ import annotations

from functools import cache

import torch

from glm_exl3.format.layout import MCG_MARKER, MUL1_MARKER, Codebook

STATES = 1 << 16
INST3_MULTIPLIER, INST3_ADDEND = 89226354, 64248484
FIELD_MASK, FIELD_FLIP = 0x8FFF8FFF, 0x3B603B60
MUL1_SCALE_BITS, MUL1_OFFSET_BITS = 0x1EEE, 0xC931


def _halves(word: torch.Tensor) -> torch.Tensor:
    """Sum of the two fp16 numbers in each 32-bit word, rounded once to fp16."""
    field = (word & FIELD_MASK) ^ FIELD_FLIP
    low = (field & 0xFFFF).to(torch.uint16).view(torch.float16)
    high = (field >> 16).to(torch.uint16).view(torch.float16)
    return (low.to(torch.float32) + high.to(torch.float32)).to(torch.float16)


def _half(bits: int) -> float:
    return float(torch.tensor([bits], dtype=torch.int32).to(torch.uint16).view(torch.float16)[0])


@cache
def codebook_table(codebook: Codebook) -> torch.Tensor:
    """fp16 [65536]: the weight of every state. Callers must not write to it."""
    state = torch.arange(STATES, dtype=torch.int64)
    if codebook is Codebook.MUL1:
        word = (state * MUL1_MARKER) & 0xFFFFFFFF
        total = sum((word >> shift) & 0xFF for shift in (0, 8, 16, 24))
        assert isinstance(total, torch.Tensor)
        exact = (1024 + total).to(torch.float64) * _half(MUL1_SCALE_BITS) + _half(MUL1_OFFSET_BITS)
        return exact.to(torch.float16)
    if codebook is Codebook.MCG:
        return _halves((state * MCG_MARKER) & 0xFFFFFFFF)
    return _halves((state * INST3_MULTIPLIER + INST3_ADDEND) & 0xFFFFFFFF)
