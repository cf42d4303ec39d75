"""`python -m kernels.small`: every kernel once on small shapes, for compute-sanitizer."""

from __future__ import annotations

import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ops import cuda_backend
from glm_exl3.ops.cuda_encode import encode_tiles
from glm_exl3.ops.tuning import Step
from kernels import inputs

RATES = ((2, Codebook.MUL1), (3, Codebook.MUL1), (4, Codebook.MCG), (6, Codebook.MCG))

WARPS = Step("tiled", product="warp")


def _experts(bits: int, codebook: Codebook, generator: torch.Generator) -> None:
    """Two hidden widths: an even and an odd number of 128 columns."""
    for hidden, same in ((256, True), (384, False)):
        w13 = inputs.random_stack(
            (6, 2), hidden, 256, 16 * bits, codebook, generator, same_suh=same
        )
        w2 = inputs.random_stack((6,), 256, hidden, 16 * bits, codebook, generator)
        stacks = cuda_backend.prepare_moe(w13, w2)
        for tokens in (1, 9, 150):
            call = inputs.random_routing(tokens, hidden, 6, 4, generator)
            cuda_backend.moe(call.x, call.ids, call.weights, *stacks, 10.0)
        cuda_backend.moe(call.x, call.ids, call.weights, *stacks, 10.0, how=WARPS)


def _matrices(bits: int, codebook: Codebook, generator: torch.Generator) -> None:
    matrix = inputs.random_matrix(512, 256, 16 * bits, codebook, generator)
    for tokens in (1, 8, 16, 40):
        x = torch.randn(tokens, 512, device="cuda", generator=generator)
        cuda_backend.linear(x.to(torch.bfloat16), matrix)
    cuda_backend.dequant(matrix, torch.bfloat16)


def main() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    for bits, codebook in RATES:
        _experts(bits, codebook, generator)
        _matrices(bits, codebook, generator)
    for last_dim, codebook in ((112, Codebook.INST3), (24, Codebook.MUL1)):
        matrix = inputs.random_matrix(256, 256, last_dim, codebook, generator)
        cuda_backend.dequant(matrix, torch.float16)
    cuda_backend.had128(torch.randn(3, 256, device="cuda"))
    encode_tiles(torch.randn(3, 256, device="cuda"), 4, Codebook.MCG)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
