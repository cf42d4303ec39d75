"""Which kernel a call reaches, with the compiled operations replaced by stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ops import cuda_backend, tuning
from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix
from glm_exl3.ops.tuning import Step

PLANS = {
    "linear": (Step("streamed", 8, 4), Step("streamed", 64), Step("decoded")),
    "moe": (Step("streamed", 8, 2), Step("streamed", 300), Step("tiled", product="warp")),
}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """(operation, rows, its cut of k or its product) of every call."""
    calls: list[tuple] = []
    ops = SimpleNamespace(
        linear_decode=lambda *a: calls.append(("linear_decode", a[0].shape[0], a[6])),
        linear_decode_workspace=lambda *a: 16,
        linear_decode_counters=lambda *a: 1,
        moe_decode=lambda *a: calls.append(("moe_decode", a[0].shape[0], a[13])),
        moe_decode_workspace=lambda *a: 16,
        moe_decode_counters=lambda *a: 1,
        moe_prefill=lambda *a: calls.append(("moe_prefill", a[0].shape[0], a[13])),
        moe_prefill_workspace=lambda *a: 16,
        dequant=lambda *a: calls.append(("dequant", *a[4].shape)),
    )
    monkeypatch.setattr(cuda_backend, "_ops", lambda: ops)
    monkeypatch.setattr(cuda_backend, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_backend, "_zeroed_counters", lambda *a: torch.zeros(1))
    monkeypatch.setattr(tuning, "plan", lambda problem, capability: PLANS[problem.op])
    return calls


def matrix(last_dim: int = 64) -> PackedMatrix:
    trellis = torch.zeros(8, 16, last_dim, dtype=torch.int16)
    return PackedMatrix(trellis, torch.ones(128).half(), torch.ones(256).half(), Codebook.MCG)


def stacks() -> tuple[Exl3Stack, Exl3Stack]:
    w13 = Exl3Stack(
        torch.zeros(4, 2, 8, 16, 64, dtype=torch.int16),
        torch.ones(4, 2, 128).half(),
        torch.ones(4, 2, 256).half(),
        Codebook.MCG,
    )
    w2 = Exl3Stack(
        torch.zeros(4, 16, 8, 64, dtype=torch.int16),
        torch.ones(4, 256).half(),
        torch.ones(4, 128).half(),
        Codebook.MCG,
    )
    return w13, w2


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (1, ("linear_decode", 1, 4)),
        (8, ("linear_decode", 8, 4)),
        (9, ("linear_decode", 9, 0)),
        (64, ("linear_decode", 64, 0)),
        (65, ("dequant", 128, 256)),
    ],
)
def test_the_plan_decides_for_dense_matrices(called, tokens: int, wanted: tuple) -> None:
    assert cuda_backend.linear(torch.zeros(tokens, 128), matrix()).shape == (tokens, 256)
    assert called == [wanted]


def test_rates_without_a_fast_kernel_are_decoded(called) -> None:
    cuda_backend.linear(torch.zeros(1, 128), matrix(last_dim=112))
    assert called == [("dequant", 128, 256)]


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (1, [("moe_decode", 1, 2)]),
        (100, [("moe_decode", 100, 0)]),
        (300, [("moe_decode", 128, 0), ("moe_decode", 128, 0), ("moe_decode", 44, 0)]),
        (301, [("moe_prefill", 301, tuning.PRODUCTS["warp"])]),
        (17000, [("moe_prefill", n, 2) for n in (8192, 8192, 616)]),
    ],
)
def test_the_plan_decides_for_experts(called, tokens: int, wanted: list[tuple]) -> None:
    ids = torch.zeros(tokens, 2, dtype=torch.int32)
    cuda_backend.moe(torch.zeros(tokens, 128), ids, torch.ones(tokens, 2), *stacks(), 10.0)
    assert called == wanted


def test_a_named_step_overrules_the_plan(called) -> None:
    ids, x = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 128)
    how = Step("tiled", product="warpgroup")
    cuda_backend.moe(x, ids, torch.ones(1, 2), *stacks(), 10.0, how=how)
    cuda_backend.linear(x, matrix(), Step("decoded"))
    assert called == [("moe_prefill", 1, tuning.PRODUCTS["warpgroup"]), ("dequant", 128, 256)]
