"""`python -m kernels.small`: every kernel once on small shapes, for compute-sanitizer.

Inputs of 640 columns are five stages of the tile kernels, so that rings of four slots come round.
"""

from __future__ import annotations

import os

import torch

from glm_exl3 import envs
from glm_exl3.format.layout import Codebook
from glm_exl3.fused import seam_cuda
from glm_exl3.ops import cuda_backend, cuda_parts, dense_rows, recoded
from glm_exl3.ops.cuda_encode import encode_tiles
from glm_exl3.ops.tuning import Step
from glm_exl3.ref import mhc
from kernels import inputs

RATES = ((2, Codebook.MUL1), (3, Codebook.MUL1), (4, Codebook.MCG), (6, Codebook.MCG))

WARPS = Step("tiled", product="warp")
# Experts, hidden width, intermediate width, whether gate and up share input scales, tokens: an even
# and an odd number of 128 columns; about 100 rows an expert, then 25 for the narrow tiles.
EXPERTS = (
    (6, 256, 640, True, (1, 9, 150)),
    (6, 640, 256, False, (1, 9, 150)),
    (24, 640, 256, False, (150,)),
)


def _experts(bits: int, codebook: Codebook, generator: torch.Generator) -> None:
    for count, hidden, width, same, numbers in EXPERTS:
        w13 = inputs.random_stack(
            (count, 2), hidden, width, 16 * bits, codebook, generator, same_suh=same
        )
        w2 = inputs.random_stack((count,), width, hidden, 16 * bits, codebook, generator)
        stacks = cuda_backend.prepare_moe(w13, w2)
        for tokens in numbers:
            call = inputs.random_routing(tokens, hidden, count, 4, generator)
            cuda_backend.moe(call.x, call.ids, call.weights, *stacks, 10.0)
        cuda_backend.moe(call.x, call.ids, call.weights, *stacks, 10.0, how=WARPS)


def _parts(bits: int, codebook: Codebook, generator: torch.Generator) -> None:
    """Packed matrices beside each other and beside dense rows; gate and up as their activation."""
    one, two = (inputs.random_matrix(512, 256, 16 * bits, codebook, generator) for _ in range(2))
    dense = torch.randn(24, 512, device="cuda", generator=generator).bfloat16()
    for tokens in (1, 3):
        x = torch.randn(tokens, 512, device="cuda", generator=generator).bfloat16()
        cuda_parts.parts(x, [one, two])
        cuda_parts.parts(x, [one, dense])
        cuda_parts.parts(x, [one, two], 10.0)


def _matrices(bits: int, codebook: Codebook, generator: torch.Generator) -> None:
    matrix = inputs.random_matrix(512, 256, 16 * bits, codebook, generator)
    for tokens in (1, 8, 16, 40):
        x = torch.randn(tokens, 512, device="cuda", generator=generator)
        cuda_backend.linear(x.to(torch.bfloat16), matrix)
    cuda_backend.dequant(matrix, torch.bfloat16)


def _byte_rows(generator: torch.Generator) -> None:
    """8-bit rows, then bf16 ones in each of the three ways to share rows and inputs."""
    weight = torch.randn(40, 1088, device="cuda", generator=generator).bfloat16()
    matrices = [recoded.encode_rows(weight, scheme) for scheme in ("fp8", "int8")]
    shapes = ((40, 1088), (200, 128), (1064, 1088))
    dense = [torch.randn(n, k, device="cuda", generator=generator).bfloat16() for n, k in shapes]
    for tokens in (1, 8, 16):
        x = torch.randn(tokens, 1088, device="cuda", generator=generator).bfloat16()
        for matrix in matrices:
            recoded.by_path(x, matrix, recoded.STREAMED)
        for rows in dense:
            dense_rows.linear(x[:, : rows.shape[1]], rows)


def _seam(generator: torch.Generator) -> None:
    """In blocks of 256 columns and of 512; memcheck wants two of them to share memory."""
    parameters = mhc.HyperParameters(1e-5, 1e-6, 1e-6, 2.0, 20)
    for hidden, blocks in ((512, 0), (1024, 0), (1024, 2)):
        shapes = ((3, hidden), (3, 4, hidden), (3, 4, 1), (3, 4, 4), (24, 4 * hidden), (3,), (24,))
        x, streams, *rest = (torch.randn(s, device="cuda", generator=generator) for s in shapes)
        norm = torch.ones(hidden, device="cuda").bfloat16()
        halves = (x.bfloat16(), streams.bfloat16())
        torch.cuda.synchronize()
        seam_cuda.seam(*halves, *rest, parameters, norm, 1e-5, blocks)


def main() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    for bits, codebook in RATES:
        for integers in "01" if codebook is Codebook.MUL1 else "0":
            os.environ[envs.INTEGER_PRODUCTS.name] = integers
            _experts(bits, codebook, generator)
            _matrices(bits, codebook, generator)
            _parts(bits, codebook, generator)
    for last_dim, codebook in ((112, Codebook.INST3), (24, Codebook.MUL1)):
        matrix = inputs.random_matrix(256, 256, last_dim, codebook, generator)
        cuda_backend.dequant(matrix, torch.float16)
    cuda_backend.had128(torch.randn(3, 256, device="cuda"))
    _byte_rows(generator)
    if seam_cuda.has_kernel(generator.device):
        _seam(generator)
    encode_tiles(torch.randn(3, 256, device="cuda"), 4, Codebook.MCG)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
