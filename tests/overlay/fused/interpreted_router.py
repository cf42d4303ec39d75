"""The router kernel under Triton's interpreter against `ref`, alone and in vLLM's classes; run by
test_router.py."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

from glm_exl3.fused import router, router_op
from glm_exl3.ref.router import route

TOP_K, SCALE, HIDDEN = 8, 2.5, 256


def inputs(tokens: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(tokens * 1000 + experts)
    x = torch.randn(tokens, HIDDEN + 8, generator=random).bfloat16()[:, :HIDDEN]
    weight = (torch.randn(experts, HIDDEN, generator=random) / 16).bfloat16()
    return x, weight, torch.randn(experts, generator=random) * 0.1


def alone(tokens: int, experts: int) -> dict[str, Any]:
    x, weight, bias = inputs(tokens, experts)
    assert router.takes(x, weight, bias)
    found = router.route(x, weight, bias, TOP_K, SCALE)
    logits, weights, ids = route(x, weight, bias, TOP_K, SCALE)
    assert not router.counter(x.device).any()
    return {
        "logits": float((found.logits - logits).abs().max()),
        "weights": float((found.weights - weights).abs().max()),
        "ids": torch.equal(found.ids, ids),
    }


def equal_scores() -> list[int]:
    """The experts chosen where all scores are equal: the lowest ids."""
    x, weight, bias = inputs(1, 40)
    return router.route(x, weight * 0, bias * 0, TOP_K, SCALE).ids[0].tolist()


def broken_inputs() -> list[int]:
    """Smallest and largest id chosen from NaN."""
    x, weight, bias = inputs(2, 40)
    ids = router.route(x * float("nan"), weight, bias, TOP_K, SCALE).ids
    return [int(ids.min()), int(ids.max())]


def gate(weight: torch.Tensor) -> router_op.RoutingGate:
    """A gate as vLLM makes it, without the parallel state that it needs for that."""
    made = router_op.RoutingGate.__new__(router_op.RoutingGate)
    torch.nn.Module.__init__(made)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    made.return_bias = True
    return made


def joined() -> dict[str, Any]:
    x, weight, bias = inputs(3, 288)
    partner = GroupedTopKRouter(
        top_k=TOP_K, global_num_experts=288, num_expert_group=1, topk_group=1, renormalize=True,
        scoring_func="sigmoid", routed_scaling_factor=SCALE, e_score_correction_bias=bias,
    )  # fmt: skip
    made = gate(weight)
    assert router_op.fits(partner)
    made.join(partner)
    logits, _ = made(x)
    kept = made.routing
    weights, ids = partner.select_experts(x, logits)
    own_weights, own_ids = partner.select_experts(x, logits)
    order, own_order = ids.sort(dim=1).indices, own_ids.sort(dim=1).indices
    near = (weights.gather(1, order) - own_weights.gather(1, own_order)).abs().max()
    made(x)
    partner.select_experts(x, logits.clone())
    return {
        "from_the_gate": kept is not None and weights is kept.weights,
        "once": own_weights is not weights and made.routing is None,
        "same_experts": torch.equal(ids.sort(dim=1).values, own_ids.sort(dim=1).values),
        "same_weights": float(near),
    }


def misfits() -> list[str]:
    """Routers that select otherwise, by what they have that is different."""
    right = {
        "scoring_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "renormalize": True,
        "num_fused_shared_experts": 0, "e_score_correction_bias": 1, "eplb_state": None,
        "skip_padding": False,
    }  # fmt: skip
    wrong = {
        "scoring_func": "softmax", "num_expert_group": 2, "topk_group": 2, "renormalize": False,
        "num_fused_shared_experts": 1, "e_score_correction_bias": None,
        "eplb_state": SimpleNamespace(), "skip_padding": True,
    }  # fmt: skip

    def router_with(**values: Any) -> GroupedTopKRouter:
        made = GroupedTopKRouter.__new__(GroupedTopKRouter)
        made.__dict__.update(values)
        return made

    assert router_op.fits(router_with(**right))
    return [name for name in wrong if router_op.fits(router_with(**right | {name: wrong[name]}))]


report = {
    "alone": [alone(*shape) for shape in ((1, 288), (2, 33), (3, 288), (8, 64))],
    "equal": equal_scores(),
    "broken": broken_inputs(),
    "joined": joined(),
    "misfits": misfits(),
}
json.dump(report, sys.stdout)
