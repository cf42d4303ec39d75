"""Dense products against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import (
    ALL_RATES,
    FAST_RATES,
    LINEAR_TOLERANCE,
    MCG,
    MUL1,
    OTHER_RATES,
    error,
    linear_in_double,
)

from glm_exl3.ops.matrix import PackedMatrix
from kernels.inputs import random_matrix

FLOATS = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 129, 300])
@pytest.mark.parametrize(("codebook", "last_dim"), FAST_RATES)
def test_fast_rates(backend, generator, codebook, last_dim, tokens, dtype):
    matrix = random_matrix(640, 384, last_dim, codebook, generator)
    x = torch.randn(tokens, 640, device="cuda", generator=generator).to(dtype)
    found = backend.linear(x, matrix)
    assert found.dtype is dtype
    assert error(found, linear_in_double(x, matrix)) < LINEAR_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 5, 65])
@pytest.mark.parametrize(("codebook", "last_dim"), OTHER_RATES)
def test_other_rates_take_the_general_way(backend, generator, codebook, last_dim, tokens):
    matrix = random_matrix(256, 384, last_dim, codebook, generator)
    assert not backend.has_fast_kernel(matrix.trellis, codebook)
    x = torch.randn(tokens, 256, device="cuda", generator=generator).bfloat16()
    assert error(backend.linear(x, matrix), linear_in_double(x, matrix)) < LINEAR_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 64, 16384])
@pytest.mark.parametrize(
    ("k", "n", "last_dim"),
    [(128, 128, 64), (8192, 1024, 64), (1536, 2048, 48), (16384, 512, 80), (4096, 512, 96)],
)
def test_shapes_of_the_model(backend, generator, k, n, last_dim, tokens):
    for codebook in (MCG, MUL1):
        matrix = random_matrix(k, n, last_dim, codebook, generator)
        x = torch.randn(tokens, k, device="cuda", generator=generator).bfloat16()
        assert error(backend.linear(x, matrix), linear_in_double(x, matrix)) < LINEAR_TOLERANCE


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 40, 100])
def test_outliers_survive(backend, generator, tokens, dtype):
    matrix = random_matrix(1024, 256, 64, MCG, generator)
    x = torch.randn(tokens, 1024, device="cuda", generator=generator).to(dtype)
    x[0, 7] = 1e4
    found, wanted = backend.linear(x, matrix), linear_in_double(x, matrix)
    for row in range(tokens):
        assert error(found[row], wanted[row]) < LINEAR_TOLERANCE


@pytest.mark.parametrize("scale", [1e-20, 1e-8, 1e15])
def test_rows_of_any_size_keep_their_precision(backend, generator, scale):
    matrix = random_matrix(512, 256, 64, MUL1, generator)
    x = torch.randn(4, 512, device="cuda", generator=generator) * scale
    assert (
        error(backend.linear(x.bfloat16(), matrix), linear_in_double(x.bfloat16(), matrix)) < 3e-3
    )


@pytest.mark.parametrize("tokens", [1, 7, 64, 200])
def test_zero_rows_give_zeros(backend, generator, tokens):
    matrix = random_matrix(512, 256, 64, MCG, generator)
    x = torch.zeros(tokens, 512, dtype=torch.bfloat16, device="cuda")
    assert not backend.linear(x, matrix).any()


def test_no_tokens_and_leading_dimensions(backend, generator):
    matrix = random_matrix(256, 384, 64, MCG, generator)
    empty = torch.zeros(0, 256, dtype=torch.bfloat16, device="cuda")
    assert backend.linear(empty, matrix).shape == (0, 384)
    x = torch.randn(2, 3, 256, device="cuda", generator=generator).bfloat16()
    assert torch.equal(
        backend.linear(x, matrix).flatten(0, 1), backend.linear(x.flatten(0, 1), matrix)
    )


@pytest.mark.parametrize("tokens", [1, 4, 64, 200])
@pytest.mark.parametrize(("codebook", "last_dim"), [(MCG, 64), (MUL1, 48), (MUL1, 96)])
def test_row_shards_sum_to_the_whole(backend, generator, codebook, last_dim, tokens):
    matrix = random_matrix(1152, 256, last_dim, codebook, generator)
    x = torch.randn(tokens, 1152, device="cuda", generator=generator)
    total = torch.zeros(tokens, 256, dtype=torch.float64, device="cuda")
    for begin, end in ((0, 384), (384, 896), (896, 1152)):
        part = PackedMatrix(
            matrix.trellis[begin // 16 : end // 16], matrix.suh[begin:end], matrix.svh, codebook
        )
        total += backend.linear(x[:, begin:end].contiguous(), part).double()
    assert error(total, linear_in_double(x, matrix)) < LINEAR_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 8, 64, 200])
def test_column_shards_join_to_the_whole(backend, generator, tokens):
    matrix = random_matrix(512, 640, 64, MCG, generator)
    x = torch.randn(tokens, 512, device="cuda", generator=generator).bfloat16()
    parts = [
        PackedMatrix(
            matrix.trellis[:, b // 16 : e // 16].contiguous(), matrix.suh, matrix.svh[b:e], MCG
        )
        for b, e in ((0, 384), (384, 640))
    ]
    joined = torch.cat([backend.linear(x, part) for part in parts], dim=1)
    assert error(joined, linear_in_double(x, matrix)) < LINEAR_TOLERANCE


@pytest.mark.parametrize(("codebook", "last_dim"), ALL_RATES)
def test_the_custom_operation_has_a_true_fake(generator, codebook, last_dim):
    from glm_exl3.ops import library

    assert library
    matrix = random_matrix(256, 128, last_dim, codebook, generator)
    x = torch.randn(3, 256, device="cuda", generator=generator).bfloat16()
    torch.library.opcheck(
        torch.ops.glm_exl3.exl3_linear.default,
        (x, matrix.trellis, matrix.suh, matrix.svh, codebook.value, "cuda"),
        test_utils=("test_schema", "test_faketensor"),
    )
