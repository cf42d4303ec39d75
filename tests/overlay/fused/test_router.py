"""The fused router: what it takes, its kernel's arithmetic without a GPU, its place in vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from glm_exl3.fused import router


@pytest.fixture(scope="module")
def report(interpreted: Callable[..., str]) -> dict[str, Any]:
    said = interpreted("interpreted_router.py")
    return json.loads(said[said.index('{"alone"') :])


def test_the_kernel_selects_as_the_reference(report: dict[str, Any]) -> None:
    for row in report["alone"]:
        assert row["ids"] and row["logits"] < 1e-4 and row["weights"] < 1e-5


def test_equal_scores_choose_the_lowest_experts(report: dict[str, Any]) -> None:
    assert report["equal"] == list(range(8))


def test_not_a_number_chooses_experts_that_exist(report: dict[str, Any]) -> None:
    low, high = report["broken"]
    assert low >= 0 and high < 40


def test_the_router_takes_what_its_gate_selected_once(report: dict[str, Any]) -> None:
    found = report["joined"]
    assert found["from_the_gate"] and found["once"] and found["same_experts"]
    assert found["same_weights"] < 1e-5


def test_routers_that_select_otherwise_stay_alone(report: dict[str, Any]) -> None:
    assert report["misfits"] == []


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "dtype", "taken"),
    [
        (1, 4096, 288, torch.bfloat16, True),
        (8, 256, 1024, torch.bfloat16, True),
        (9, 4096, 288, torch.bfloat16, False),
        (0, 4096, 288, torch.bfloat16, False),
        (1, 3072, 288, torch.bfloat16, False),
        (1, 256, 1025, torch.bfloat16, False),
        (1, 4096, 288, torch.float32, False),
    ],
)
def test_only_calls_it_is_made_for_are_taken(tokens, hidden, experts, dtype, taken) -> None:
    x, weight = torch.empty(tokens, hidden, dtype=dtype), torch.empty(experts, hidden, dtype=dtype)
    assert router.takes(x, weight, torch.zeros(experts)) is taken
    assert not router.takes(x, weight, None)
