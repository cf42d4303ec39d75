"""Few tokens times mul1 matrices on integer matrix instructions."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_cases import (
    LINEAR_TOLERANCE,
    MCG,
    MOE_TOLERANCE,
    MUL1,
    error,
    linear_in_double,
    moe_in_double,
    random_stacks,
    run_moe,
    tokens_of,
)

from glm_exl3 import envs
from kernels.inputs import random_matrix, random_routing

RATES = [16 * bits for bits in (2, 3, 4, 5, 6)]


@pytest.fixture(autouse=True)
def integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.INTEGER_PRODUCTS.name, "1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("last_dim", RATES)
def test_dense_matrices(backend, generator, last_dim, tokens, dtype):
    matrix = random_matrix(640, 384, last_dim, MUL1, generator)
    x = tokens_of(tokens, 640, generator, dtype)
    assert error(backend.linear(x, matrix), linear_in_double(x, matrix)) < LINEAR_TOLERANCE


def test_auto_is_what_was_measured_on_this_gpu(backend, generator, monkeypatch):
    matrix, x = random_matrix(4096, 384, 48, MUL1, generator), tokens_of(1, 4096, generator)
    found = {}
    for setting in ("auto", "0", "1"):
        monkeypatch.setenv(envs.INTEGER_PRODUCTS.name, setting)
        found[setting] = backend.linear(x.float(), matrix)
    assert not torch.equal(found["0"], found["1"])
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert torch.equal(found["auto"], found["1" if hopper else "0"])


@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize(
    ("k", "n", "last_dim"),
    [(128, 128, 64), (8192, 1024, 80), (1536, 2048, 80), (16384, 512, 80), (4096, 4096, 96)],
)
def test_shapes_of_the_model(backend, generator, k, n, last_dim, tokens):
    matrix, x = random_matrix(k, n, last_dim, MUL1, generator), tokens_of(tokens, k, generator)
    assert error(backend.linear(x, matrix), linear_in_double(x, matrix)) < LINEAR_TOLERANCE


@pytest.mark.parametrize("value", [1.0, -1.0, 1e4, 1e-20, 1e15])
def test_the_longest_sums_fit(backend, generator, value):
    """16,384 columns that are all the largest number there is after rotation."""
    from glm_exl3.ops.matrix import PackedMatrix

    drawn_matrix = random_matrix(16384, 128, 48, MUL1, generator)
    ones = torch.ones_like(drawn_matrix.suh)
    matrix = PackedMatrix(drawn_matrix.trellis, ones, drawn_matrix.svh, MUL1)
    spikes = torch.zeros(1, 16384, device="cuda")
    spikes[:, ::128] = value
    x = torch.cat([spikes, -spikes]).float()
    assert error(backend.linear(x, matrix), linear_in_double(x, matrix)) < LINEAR_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_outliers_survive(backend, generator, tokens):
    matrix, x = random_matrix(1024, 256, 48, MUL1, generator), tokens_of(tokens, 1024, generator)
    x[0, 7] = 1e4
    found, wanted = backend.linear(x, matrix), linear_in_double(x, matrix)
    for row in range(tokens):
        assert error(found[row], wanted[row]) < LINEAR_TOLERANCE


@pytest.mark.parametrize("last_dim", RATES)
def test_neighbours_change_no_bit(backend, generator, last_dim):
    matrix, x = random_matrix(1536, 512, last_dim, MUL1, generator), tokens_of(8, 1536, generator)
    together = backend.linear(x, matrix)
    for first, last in ((0, 1), (2, 4), (1, 5), (0, 7)):
        assert torch.equal(backend.linear(x[first:last], matrix), together[first:last])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_what_is_no_number_stays_in_its_row(backend, generator, tokens, bad):
    """Whole numbers cannot say it, so the row's scale does."""
    matrix, x = random_matrix(1024, 256, 48, MUL1, generator), tokens_of(tokens, 1024, generator)
    clean = backend.linear(x, matrix)
    x[0, 700] = bad
    found = backend.linear(x, matrix)
    assert found[0].isnan().all()
    assert torch.equal(found[1:], clean[1:])
    stacks = random_stacks(generator, 16, 1024, 256, 48, MUL1)
    call = random_routing(tokens, 1024, 16, 4, generator)
    clean = run_moe(backend, call, *stacks)
    call.x[0, 700] = bad
    found = run_moe(backend, call, *stacks)
    assert found[0].isnan().all()
    assert torch.equal(found[1:], clean[1:])


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 33, 128])
@pytest.mark.parametrize("last_dim", RATES)
def test_routed_experts(backend, generator, last_dim, tokens, same):
    stacks = random_stacks(generator, 16, 640, 384, last_dim, MUL1, same_suh=same)
    call = random_routing(tokens, 640, 16, 8, generator)
    found = run_moe(backend, call, *stacks)
    assert error(found, moe_in_double(call, *stacks)) < MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [3, 5, 8])
def test_one_expert_may_have_every_row(backend, generator, tokens):
    stacks = random_stacks(generator, 8, 256, 256, 48, MUL1)
    call = random_routing(tokens, 256, 8, 1, generator)
    call.ids.fill_(5)
    found = run_moe(backend, call, *stacks)
    assert error(found, moe_in_double(call, *stacks)) < MOE_TOLERANCE


@pytest.mark.parametrize("rates", [(48, MUL1, 64, MCG), (64, MCG, 48, MUL1)])
def test_only_mul1_is_multiplied_so(backend, generator, rates):
    w13, _ = random_stacks(generator, 8, 256, 256, *rates[:2])
    _, w2 = random_stacks(generator, 8, 256, 256, *rates[2:])
    call = random_routing(4, 256, 8, 4, generator)
    found = run_moe(backend, call, w13, w2)
    assert error(found, moe_in_double(call, w13, w2)) < MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_parts_have_the_bits_of_each_alone(backend, generator, tokens):
    parts = [random_matrix(4096, n, 80, MUL1, generator) for n in (1536, 512)]
    x = tokens_of(tokens, 4096, generator)
    alone = torch.cat([backend.linear(x, part) for part in parts], dim=1)
    assert torch.equal(backend.parts(x, parts), alone)
