"""The router of routed experts: gate, selection by biased scores, weights from unbiased ones.

Source: `Glm5NextTopkRouter` of transformers 5.16 with one group of experts (`n_group` 1).
"""

from __future__ import annotations

from torch import Tensor


def route(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x `[T, H]`, gate weight `[E, H]`, correction bias fp32 `[E]`.

    Returns logits fp32 `[T, E]`, weights fp32 `[T, top_k]` that sum to `scale`, and expert ids
    int32 `[T, top_k]` by falling biased score, the lower id first among equals.
    """
    logits = x.float() @ weight.float().T
    scores = logits.sigmoid()
    ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, ids)
    return logits, chosen / chosen.sum(dim=-1, keepdim=True) * scale, ids.int()
