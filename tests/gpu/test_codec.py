"""Dequantisation, rotation and the encoder against the reference."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import ALL_RATES, error

from glm_exl3.format.layout import Codebook
from glm_exl3.ref.decode import decode_rotated, dequantize
from glm_exl3.ref.encode import encode_tiles as reference_encode
from glm_exl3.ref.hadamard import had128
from kernels.inputs import random_matrix


@pytest.mark.parametrize(("codebook", "last_dim"), ALL_RATES)
def test_dequant_is_exact_before_and_close_after_the_rotations(
    backend, generator, codebook, last_dim
):
    matrix = random_matrix(256, 384, last_dim, codebook, generator)
    inner = torch.empty(256, 384, dtype=torch.float16, device="cuda")
    backend._ops().dequant(matrix.trellis, None, None, backend._CODES[codebook], inner)
    assert torch.equal(inner, decode_rotated(matrix.trellis, codebook))
    wanted = dequantize(matrix.trellis, matrix.suh, matrix.svh, codebook, torch.float64)
    assert error(backend.dequant(matrix, torch.float32), wanted) < 1e-6
    assert error(backend.dequant(matrix, torch.bfloat16), wanted) < 3e-3
    assert error(backend.dequant(matrix, torch.float16), wanted) < 4e-4


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)]
)
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_had128_matches_the_reference(backend, generator, dtype, tolerance, rows):
    x = torch.randn(rows, 384, device="cuda", generator=generator).to(dtype)
    pre, post = (torch.randn(384, device="cuda", generator=generator).half() for _ in range(2))
    assert error(backend.had128(x), had128(x.double())) < tolerance
    wanted = had128(x.double() * pre.double()) * post.double()
    assert error(backend.had128(x, pre, post), wanted) < tolerance


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", range(1, 9))
def test_encoder_returns_the_bits_of_the_reference(generator, bits, codebook):
    from glm_exl3.ops.cuda_encode import encode_tiles

    tiles = torch.randn(37, 256, device="cuda", generator=generator)
    assert torch.equal(encode_tiles(tiles, bits, codebook), reference_encode(tiles, bits, codebook))


def test_the_custom_operations_have_true_fakes(generator):
    from glm_exl3.ops import library

    assert library
    ops, checks = torch.ops.glm_exl3, ("test_schema", "test_faketensor")
    x = torch.randn(3, 256, device="cuda", generator=generator).half()
    scales = torch.randn(256, device="cuda", generator=generator).half()
    matrix = random_matrix(256, 128, 64, Codebook.MCG, generator)
    torch.library.opcheck(ops.had128.default, (x, scales, None, "cuda"), test_utils=checks)
    torch.library.opcheck(ops.exl3_encode.default, (x, 4, "mcg", "cuda"), test_utils=checks)
    arguments = (matrix.trellis, matrix.suh, matrix.svh, "mcg", torch.bfloat16, "cuda")
    torch.library.opcheck(ops.exl3_dequant.default, arguments, test_utils=checks)
