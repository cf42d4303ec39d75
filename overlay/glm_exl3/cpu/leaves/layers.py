"""Small layers: norms, the MTP input, and routed experts that were not quantised."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm_exl3.ref.mhc import rms_norm


def fused_q_kv_rmsnorm(
    qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm of the two latent vectors of an MLA layer."""
    return rms_norm(qr, q_weight, eps), rms_norm(kv, kv_weight, eps)


def fused_eh_norm(  # noqa: PLR0913, PLR0917 - vLLM's signature
    positions: Tensor,
    inputs_embeds: Tensor,
    previous_hidden: Tensor,
    enorm_w: Tensor,
    hnorm_w: Tensor,
    eps: float,
) -> Tensor:
    """MTP input `[n, 2 H]`: normed embeddings (zero at position 0) beside normed hidden states."""
    embeds = torch.where(positions[:, None] == 0, 0.0, inputs_embeds.float())
    left = rms_norm(embeds, enorm_w, eps).to(inputs_embeds.dtype)
    return torch.cat([left, rms_norm(previous_hidden, hnorm_w, eps)], dim=-1)


def routed_experts(  # noqa: PLR0913, PLR0917 - the parts of one MoE layer
    hidden: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    limit: float | None,
    weigh: bool = True,
) -> Tensor:
    """Sum of the chosen experts with the clamped SwiGLU, fp32 inside.

    hidden `[T, H]`, w13 `[E, 2 I, H]` gate first, w2 `[E, H, I]`, weights and ids `[T, k]`; ids
    outside `[0, E)` are another rank's. The gate is clamped from above and the up part on both
    sides before SiLU, as transformers does.
    """
    total = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        if not 0 <= expert < w13.shape[0]:
            continue
        tokens, choices = torch.where(ids == expert)
        gate, up = F.linear(hidden[tokens].float(), w13[expert].float()).chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        result = F.linear((F.silu(gate) * up), w2[expert].float())
        if weigh:
            result = result * weights[tokens, choices, None].float()
        total.index_add_(0, tokens, result)
    return total


def prepare_experts(self: Any, layer: Any) -> None:
    """Keep the weights as loaded, widened to fp32 once, and remember the clamp."""
    self._use_zentorch = False
    self.swiglu_limit = getattr(layer, "swiglu_limit", None)
    layer.w13_weight.data = layer.w13_weight.data.float()
    layer.w2_weight.data = layer.w2_weight.data.float()


def apply_experts(  # noqa: PLR0913, PLR0917 - vLLM's signature
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *others: Any,
    apply_router_weight_on_input: bool = False,
    **_: Any,
) -> None:
    """`CPUUnquantizedExperts.apply` with the clamp that vLLM's own leaves out."""
    skip = bool(others[-1]) if others and isinstance(others[-1], bool) else False
    weigh = not (apply_router_weight_on_input or skip)
    output.copy_(
        routed_experts(hidden_states, w1, w2, topk_weights, topk_ids, self.swiglu_limit, weigh)
    )


def keep_weight(layer: Any, remove_weight: bool = False) -> None:
    """`dispatch_cpu_unquantized_gemm`: multiply with the weight as it is, repack nothing."""
    layer.cpu_linear = F.linear
