"""The seam of an mHC layer (`mhc_seam`) by this project's CUDA kernel, csrc/seam.cu.

A token's bits depend neither on its neighbours nor on their number. One H200, 2026-11-30, in a
graph of 90 calls: 3.2 us at one token and 4.6 at eight, where vLLM's two launches take 9
(`python -m e2e.seam`).

What must stay true: the kernel reads `fn`, `scale`, `base` and `norm_weight` before the launch
ahead of it has ended, so they must be older than that launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm_exl3.ops import ext
from glm_exl3.ref.mhc import HyperParameters

STREAMS = 4
MAX_TOKENS = 16
HIDDEN_SIZES = tuple(256 * blocks for blocks in (1, 2, 4, 8, 16))
CLUSTERS = (9, 0)
"""The first compute capability whose blocks form clusters."""


def has_kernel(device: torch.device) -> bool:
    """Whether the kernel runs on `device`, as it is or built at first use."""
    return ext.runs_on(device, CLUSTERS)


def takes(streams: Tensor, norm_weight: Tensor) -> bool:
    """As `mhc_seam.takes`, of this kernel alone."""
    tokens, count, hidden = streams.shape
    return (
        0 < tokens <= MAX_TOKENS
        and count == STREAMS
        and hidden in HIDDEN_SIZES
        and streams.dtype is torch.bfloat16
        and norm_weight.dtype is torch.bfloat16
        and has_kernel(streams.device)
    )


def seam(  # noqa: PLR0913, PLR0917 - the tensors of one seam in their order
    x: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    parameters: HyperParameters,
    norm_weight: Tensor,
    norm_eps: float,
    blocks: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `mhc_seam.seam`, of any number of tokens; at most `blocks` thread blocks a token, 0: as
    many as serve best."""
    tokens = x.shape[0]
    new_streams, block_input = torch.empty_like(streams), torch.empty_like(x)
    post_out = torch.empty(tokens, STREAMS, 1, dtype=torch.float32, device=x.device)
    comb_out = torch.empty(tokens, STREAMS, STREAMS, dtype=torch.float32, device=x.device)
    ext.operators().seam(
        x,
        streams,
        post,
        comb,
        fn,
        scale,
        base,
        norm_weight,
        parameters.rms_eps,
        parameters.pre_eps,
        parameters.sinkhorn_eps,
        parameters.post_multiplier,
        norm_eps,
        parameters.iterations,
        blocks,
        new_streams,
        post_out,
        comb_out,
        block_input,
    )
    return new_streams, post_out, comb_out, block_input
