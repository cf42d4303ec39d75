"""vLLM's `MHCFusedPostPreOp` with the one-launch seam for few tokens."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.mhc import MHCFusedPostPreOp

from glm_exl3.fused import mhc_seam
from glm_exl3.ref.mhc import HyperParameters


class SeamOp(MHCFusedPostPreOp):
    """Takes decode and verify steps; every other call is the parent's."""

    def forward_cuda(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post_layer_mix: torch.Tensor,
        comb_res_mix: torch.Tensor,
        fn: torch.Tensor,
        hc_scale: torch.Tensor,
        hc_base: torch.Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float,
        sinkhorn_repeat: int,
        n_splits: int = 1,
        tile_n: int = 1,
        norm_weight: torch.Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """New streams, post and comb of the next block, its normalised input."""
        if norm_weight is not None and mhc_seam.takes(residual, norm_weight):
            numbers = HyperParameters(
                rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
            )
            return mhc_seam.seam(
                x.contiguous(),
                residual.contiguous(),
                post_layer_mix.contiguous(),
                comb_res_mix.contiguous(),
                fn,
                hc_scale,
                hc_base,
                numbers,
                norm_weight,
                norm_eps,
            )
        return super().forward_cuda(
            x,
            residual,
            post_layer_mix,
            comb_res_mix,
            fn,
            hc_scale,
            hc_base,
            rms_eps,
            hc_pre_eps,
            hc_sinkhorn_eps,
            hc_post_mult_value,
            sinkhorn_repeat,
            n_splits,
            tile_n,
            norm_weight,
            norm_eps,
        )
