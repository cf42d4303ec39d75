"""The seam between two blocks of an mHC layer in one launch, and which kernel makes it.

What: `ref.mhc.expand` of the last block's output, the mixing weights of the next block, its
collapsed input and that input's RMSNorm.

    cuda    csrc/seam.cu, up to 16 tokens, where blocks form clusters (compute capability 9)
    triton  `seam_triton`, up to 2 tokens, where they do not or for other hidden sizes

Calls that neither takes stay with vLLM.
"""

from __future__ import annotations

from torch import Tensor

from glm_exl3.fused import seam_cuda, seam_triton
from glm_exl3.ref.mhc import HyperParameters

CUDA, TRITON = "cuda", "triton"
MAX_TOKENS = seam_cuda.MAX_TOKENS


def path_for(streams: Tensor, norm_weight: Tensor) -> str | None:
    """The kernel for streams `[T, N, H]` of this shape, dtype and device, if there is one."""
    if seam_cuda.takes(streams, norm_weight):
        return CUDA
    return TRITON if seam_triton.takes(streams, norm_weight) else None


def takes(streams: Tensor, norm_weight: Tensor) -> bool:
    """Whether `seam` is made for streams `[T, N, H]` of this shape, dtype and device."""
    return path_for(streams, norm_weight) is not None


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x bf16 `[T, H]`, streams bf16 `[T, 4, H]`, post fp32 `[T, 4, 1]`, comb fp32 `[T, 4, 4]`; fn
    fp32 `[24, 4H]`, scale `[3]`, base `[24]`; norm_weight bf16 `[H]`. All contiguous.

    Returns new streams, post and comb of the next block, and its normalised input bf16 `[T, H]`.
    """
    run = seam_cuda.seam if path_for(streams, norm_weight) == CUDA else seam_triton.seam
    return run(x, streams, post, comb, fn, scale, base, parameters, norm_weight, norm_eps)
