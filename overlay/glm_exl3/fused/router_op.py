"""The gate that selects the experts of a decode step on its way.

The gate runs inside vLLM's expert runner right before the runner's router. The gate keeps what it
selected until that router asks with the same logits; every other call is the router's own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.models.glm5next.common.model import Glm5NextMoE

from glm_exl3.fused.gate_op import RowsGate
from glm_exl3.fused.router import Routing, route, takes


class RoutingGate(RowsGate):
    """Routes steps of up to 8 tokens in one launch once `join` gave it a router."""

    router: GroupedTopKRouter | None = None
    routing: Routing | None = None

    def forward(self, x: torch.Tensor) -> Any:
        """Logits fp32 `[T, E]` and no bias, as the parent."""
        partner = self.router
        bias = None if partner is None else partner.e_score_correction_bias
        if partner is None or bias is None or not takes(x, self.weight, bias):
            return super().forward(x)
        scale = float(partner.routed_scaling_factor)
        self.routing = route(x, self.weight, bias, partner.top_k, scale)
        return self._return(self.routing.logits)

    def take(self, logits: torch.Tensor) -> Routing | None:
        """What was selected together with these logits, once."""
        routing, self.routing = self.routing, None
        return routing if routing is not None and routing.logits is logits else None

    def join(self, partner: GroupedTopKRouter) -> None:
        """Answer for `partner` whenever this gate has routed the step already."""
        routed_by_partner = partner._compute_routing

        def compute(
            hidden_states: torch.Tensor,
            router_logits: torch.Tensor,
            indices_type: torch.dtype | None,
            *,
            input_ids: torch.Tensor | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            routing = self.take(router_logits)
            if routing is None:
                return routed_by_partner(
                    hidden_states, router_logits, indices_type, input_ids=input_ids
                )
            return routing.weights, routing.ids

        partner._compute_routing = compute
        self.router = partner


def fits(partner: Any) -> bool:
    """Whether a router selects as `ref.route` does."""
    return (
        isinstance(partner, GroupedTopKRouter)
        and partner.scoring_func == "sigmoid"
        and partner.num_expert_group == partner.topk_group == 1
        and partner.renormalize
        and partner.num_fused_shared_experts == 0
        and partner.e_score_correction_bias is not None
        and partner.eplb_state is None
        and not partner.skip_padding
    )


def join_all(model: torch.nn.Module) -> int:
    """Join gate and router of every layer of routed experts; the number of layers."""
    joined = 0
    for module in model.modules():
        if isinstance(module, Glm5NextMoE) and isinstance(module.gate, RoutingGate):
            partner = module.experts.router
            if fits(partner):
                module.gate.join(partner)
                joined += 1
    return joined
