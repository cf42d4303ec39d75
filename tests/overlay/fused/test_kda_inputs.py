"""The fused KDA inputs: what they take, and the kernel's arithmetic without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from glm_exl3.fused import kda_inputs


def test_the_kernel_computes_the_reference_and_spares_the_null_block(
    interpreted: Callable[..., str],
) -> None:
    report = json.loads(interpreted("interpreted_kda.py"))
    assert report["convolved"] <= 0.0625  # two bf16 steps at the largest values
    assert report["gates"] <= 0.03125
    assert report["advanced"]
    assert report["untouched"]


@pytest.mark.parametrize(
    ("tokens", "channels", "taps", "taken"),
    [
        (1, 24576, 4, True),
        (8, 1536, 4, True),
        (9, 1536, 4, False),
        (1, 1536, 3, False),
        (1, 100, 4, False),
    ],
)
def test_only_calls_it_is_made_for_are_taken(
    tokens: int, channels: int, taps: int, taken: bool
) -> None:
    qkv = torch.empty(tokens, channels, dtype=torch.bfloat16)
    gate = torch.empty(512, 128, dtype=torch.bfloat16)
    assert kda_inputs.takes(qkv, gate, torch.empty(channels, taps)) is taken
