"""mHC operators: the `forward_cpu` of vLLM's three, which drop the layer's norm weight, anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm_exl3.ref import mhc

FEW_TOKENS = 64


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """`ref.mhc.sinkhorn`; for few tokens through numpy, whose calls cost a third of torch's."""
    if logits.shape[0] > FEW_TOKENS:
        return mhc.sinkhorn(logits, iterations, eps)
    comb = torch.softmax(logits, dim=-1) + eps
    values, small = comb.numpy(), np.float32(eps)
    values /= values.sum(-2, keepdims=True) + small
    for _ in range(iterations - 1):
        values /= values.sum(-1, keepdims=True) + small
        values /= values.sum(-2, keepdims=True) + small
    return comb


def pre(  # noqa: PLR0913, PLR0917 - vLLM's signature
    self: Any,
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Post and mix weights, and the collapsed, normalised block input."""
    parameters = mhc.HyperParameters(
        rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    )
    weights, post_mix, comb = mhc.mixing_weights(
        residual, fn, hc_scale, hc_base, parameters, sinkhorn
    )
    return post_mix, comb, mhc.collapse(residual, weights, norm_weight, norm_eps)


def post(
    self: Any, x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor
) -> Tensor:
    """New streams from a block's output."""
    return mhc.expand(x, residual, post_layer_mix, comb_res_mix)


def post_pre(  # noqa: PLR0913, PLR0917 - vLLM's signature
    self: Any,
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Expand the last block's output, then prepare the next block's input."""
    streams = mhc.expand(x, residual, post_layer_mix, comb_res_mix)
    parameters = mhc.HyperParameters(
        rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    )
    weights, post_mix, comb = mhc.mixing_weights(
        streams, fn, hc_scale, hc_base, parameters, sinkhorn
    )
    return streams, post_mix, comb, mhc.collapse(streams, weights, norm_weight, norm_eps)
