"""The shared expert beside the routed ones: order on a device without streams, and who runs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe.runner.shared_experts import (  # noqa: E402
    SharedExpertsOrder,
)

from glm_exl3.quant import beside, moe  # noqa: E402

X = torch.ones(2, 4)


class Loaded:
    def apply(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize("knob", ["", "0", "1"])
def test_the_method_runs_the_shared_expert_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, knob: str
) -> None:
    monkeypatch.setenv("GLM_EXL3_SHARED_BESIDE", knob)
    method = moe.Exl3MoEMethod(None, None, [])
    assert method.mk_can_overlap_shared_experts is (knob == "1")
    ran: list[SharedExpertsOrder] = []
    layer = SimpleNamespace(exl3=Loaded(), swiglu_limit=None, expert_map=None)
    out = method.apply(layer, X, X, X, lambda _, order: ran.append(order), X)
    assert torch.equal(out, X + 1)
    wanted = [SharedExpertsOrder.MK_INTERNAL_OVERLAPPED] if knob == "1" else []
    assert ran == wanted


def test_a_layer_without_shared_experts_has_only_the_routed_sum() -> None:
    assert beside.shared_call(None, X) is None
    assert torch.equal(beside.both(lambda: X, None, X), X)
