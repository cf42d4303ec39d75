"""Manifold-constrained hyper-connections: mixing weights, stream collapse and expansion.

What: the three weights of a block (collapse `pre`, expand `post`, mix `comb`) from the streams, and
the two uses of them. Why this shape: the collapse needs only `pre`, so it happens where `pre` is
known, and the caller keeps `post` and `comb` until the block has run. All maths is fp32; only the
collapsed input and the new streams go back to the streams' dtype.

What must stay true: the layer's RMSNorm weight belongs to the collapse. Dropping it leaves finite,
plausible and wrong logits, so `collapse` takes it as an argument instead of leaving it to a caller.
Source: the mHC paper (Xie et al., 2026) and transformers' `Glm5NextTextHyperConnection`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HyperParameters:
    """Constants of one model: `rms_eps` of the flattened streams, the rest as in its config."""

    rms_eps: float
    pre_eps: float
    sinkhorn_eps: float
    post_multiplier: float
    iterations: int


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dim in fp32, returned in `x.dtype`; `weight` may be absent."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        wide = wide * weight.float()
    return wide.to(x.dtype)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Make `[..., N, N]` logits nearly doubly stochastic: softmax rows, then alternate sums."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb /= comb.sum(dim=-2, keepdim=True).add_(eps)
    for _ in range(iterations - 1):
        comb /= comb.sum(dim=-1, keepdim=True).add_(eps)
        comb /= comb.sum(dim=-2, keepdim=True).add_(eps)
    return comb


def mixing_weights(  # noqa: PLR0917 - the tensors of one block in their order
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    parameters: HyperParameters,
    normalise: Callable[[Tensor, int, float], Tensor] = sinkhorn,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of one block from its input streams.

    streams `[T, N, H]`; fn `[(2 + N) * N, N * H]`, scale `[3]`, base `[(2 + N) * N]`, all fp32.
    normalise: `sinkhorn`, or another form of it.
    Returns fp32 pre `[T, N]`, post `[T, N, 1]` and comb `[T, N, N]`.
    """
    tokens, count, _ = streams.shape
    flat = streams.flatten(1).float()
    mixes = flat @ fn.t()
    mixes *= torch.rsqrt(flat.square().mean(-1, keepdim=True) + parameters.rms_eps)
    pre, post, comb = mixes.split([count, count, count * count], dim=-1)
    pre_base, post_base, comb_base = base.split([count, count, count * count])
    pre = torch.sigmoid(pre * scale[0] + pre_base) + parameters.pre_eps
    post = torch.sigmoid(post * scale[1] + post_base) * parameters.post_multiplier
    comb = (comb * scale[2] + comb_base).view(tokens, count, count)
    comb = normalise(comb, parameters.iterations, parameters.sinkhorn_eps)
    return pre, post.unsqueeze(-1), comb


def collapse(
    streams: Tensor, pre: Tensor, norm_weight: Tensor | None = None, norm_eps: float = 0.0
) -> Tensor:
    """Block input `[T, H]`: the streams weighted by `pre`, then RMSNorm where a weight is given."""
    collapsed = torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)
    if norm_weight is None:
        return collapsed
    return rms_norm(collapsed, norm_weight, norm_eps)


def expand(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams `[T, N, H]`: `comb` transposed applied to the streams, plus `post * output`."""
    mixed = torch.bmm(comb.float().transpose(1, 2), streams.float())
    mixed += post.float().view(*post.shape[:2], 1) * output.unsqueeze(1).float()
    return mixed.to(streams.dtype)
