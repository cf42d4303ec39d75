"""mHC operators: the `forward_cpu` of vLLM's three, which drop the layer's norm weight, anew."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from glm_exl3.ref import mhc


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
    weights, post_mix, comb = mhc.mixing_weights(residual, fn, hc_scale, hc_base, parameters)
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
    weights, post_mix, comb = mhc.mixing_weights(streams, fn, hc_scale, hc_base, parameters)
    return streams, post_mix, comb, mhc.collapse(streams, weights, norm_weight, norm_eps)
