"""`python -m kernels.small`: every kernel once on small shapes, for compute-sanitizer."""

from __future__ import annotations

import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ops import cuda_backend
from glm_exl3.ops.cuda_encode import encode_tiles
from kernels import inputs


def main() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    for bits, codebook in ((4, Codebook.MCG), (3, Codebook.MUL1)):
        w13 = inputs.random_stack((6, 2), 256, 256, 16 * bits, codebook, generator)
        w2 = inputs.random_stack((6,), 256, 256, 16 * bits, codebook, generator)
        stacks = cuda_backend.prepare_moe(w13, w2)
        for tokens in (1, 9, 200):
            call = inputs.random_routing(tokens, 256, 6, 4, generator)
            cuda_backend.moe(call.x, call.ids, call.weights, *stacks, 10.0)
        matrix = inputs.random_matrix(256, 256, 16 * bits, codebook, generator)
        for tokens in (1, 8, 40):
            x = torch.randn(tokens, 256, device="cuda", generator=generator)
            cuda_backend.linear(x.to(torch.bfloat16), matrix)
        cuda_backend.dequant(matrix, torch.bfloat16)
        cuda_backend.had128(torch.randn(3, 256, device="cuda"))
    encode_tiles(torch.randn(3, 256, device="cuda"), 4, Codebook.MCG)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
