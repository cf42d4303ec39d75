"""Several matrices in one launch against each of them alone."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_cases import (
    FAST_RATES,
    LINEAR_TOLERANCE,
    MCG,
    MUL1,
    error,
    linear_in_double,
    tokens_of,
)

from glm_exl3.ops.matrix import PackedMatrix
from glm_exl3.ref.linear import exl3_parts_apart
from kernels.inputs import random_matrix

TOKENS = [1, 2, 3, 5, 8, 9, 70]
SHAPES = [(4096, (2048, 2048)), (4096, (1536, 512)), (640, (128, 384, 256)), (128, (128, 128))]


def matrices(k, widths, generator, last_dim=80, codebook=MUL1):
    return [random_matrix(k, n, last_dim, codebook, generator) for n in widths]


def alone(backend, x, parts):
    return torch.cat(
        [backend.linear(x, p) if isinstance(p, PackedMatrix) else x @ p.t() for p in parts], dim=1
    )


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("k", "widths"), SHAPES)
def test_parts_have_the_bits_of_each_alone(backend, generator, k, widths, tokens):
    parts, x = matrices(k, widths, generator), tokens_of(tokens, k, generator)
    found = backend.parts(x, parts)
    assert torch.equal(found, alone(backend, x, parts))
    assert torch.equal(backend.parts(x, parts), found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("codebook", "last_dim"), FAST_RATES)
def test_every_fast_rate_and_type(backend, generator, codebook, last_dim, tokens, dtype):
    parts = matrices(640, (384, 128), generator, last_dim, codebook)
    x = tokens_of(tokens, 640, generator, dtype)
    assert torch.equal(backend.parts(x, parts), alone(backend, x, parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [65, 2048, 8192])
@pytest.mark.parametrize(
    ("k", "widths", "rows"),
    [(4096, (24576,), 320), (4096, (2048, 2048), 0), (4096, (1536, 512), 64), (640, (128, 384), 8)],
)
def test_many_tokens_have_the_bits_of_products_laid_together(
    backend, generator, k, widths, rows, tokens, dtype
):
    """Written into their columns; rows of a wider output must not change the vendor's kernel."""
    parts = matrices(k, widths, generator)
    if rows:
        dense = torch.randn(rows, k, device="cuda", generator=generator).to(dtype)
        parts.append(dense / k**0.5)
    x = tokens_of(tokens, k, generator, dtype)
    wanted = alone(backend, x, parts)
    assert torch.equal(backend.side_by_side(x, parts), wanted)
    assert torch.equal(backend.parts(x, parts), wanted)


def test_many_tokens_are_not_copied(backend, generator):
    parts, x = matrices(640, (128, 384), generator), tokens_of(2048, 640, generator)
    backend.side_by_side(x, parts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        backend.side_by_side(x, parts)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages() if "FillFunctor" not in event.key]
    assert names  # and scratch that is filled is no copy
    assert not [name for name in names if "Cat" in name or "copy" in name or "elementwise" in name]


def test_a_row_of_a_wider_tensor(backend, generator):
    parts = matrices(512, (128, 256), generator)
    dense = torch.randn(24, 512, device="cuda", generator=generator).bfloat16()
    x = tokens_of(3, 520, generator)[1:2, 4:516]
    found = backend.parts(x, [*parts, dense])
    assert torch.equal(found, backend.parts(x.clone(), [*parts, dense]))
    assert torch.equal(found[:, :384], alone(backend, x.clone(), parts))


def test_rates_and_more_parts_than_a_launch_takes(backend, generator):
    parts = [
        *matrices(512, (128, 256, 128, 384, 128), generator, 64, MCG),
        *matrices(512, (256, 128), generator, 48, MUL1),
    ]
    x = tokens_of(2, 512, generator)
    assert torch.equal(backend.parts(x, parts), alone(backend, x, parts))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 4, 24, 320])
@pytest.mark.parametrize("k", [128, 640, 4096])
def test_dense_rows_beside_packed_parts(backend, generator, k, rows, dtype, tokens):
    packed = random_matrix(k, 1024, 64, MCG, generator)
    dense = (torch.randn(rows, k, device="cuda", generator=generator) / k**0.5).to(dtype)
    x = tokens_of(tokens, k, generator, dtype)
    for parts, at in (([packed, dense], (0, 1024)), ([dense, packed], (rows, 0))):
        found = backend.parts(x, parts)
        assert torch.equal(found[:, at[0] : at[0] + 1024], backend.linear(x, packed))
        wanted = x.double() @ dense.double().t()
        assert error(found[:, at[1] : at[1] + rows], wanted) < LINEAR_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("limit", [math.inf, 1.0])
@pytest.mark.parametrize(("k", "n"), [(4096, 2048), (4096, 12288), (128, 128)])
def test_gate_and_up_leave_as_their_activation(backend, generator, k, n, limit, tokens):
    parts, x = matrices(k, (n, n), generator), tokens_of(tokens, k, generator)
    found = backend.parts(x, parts, limit)
    wanted = exl3_parts_apart([backend.linear(x, part) for part in parts], limit)
    assert found.shape == (tokens, n)
    assert error(found, wanted) < 1e-3
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-6 * float(wanted.abs().max()))
    exact = exl3_parts_apart([linear_in_double(x, part) for part in parts], limit)
    assert error(found, exact) < 3 * LINEAR_TOLERANCE


def test_the_activation_agrees_with_vllms(backend, generator):
    activation = pytest.importorskip("vllm.model_executor.layers.activation")
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        act = activation.SiluAndMulWithClamp(10.0)
    parts, x = matrices(4096, (2048, 2048), generator), tokens_of(1, 4096, generator)
    wanted = act.forward_cuda(alone(backend, x, parts))
    found = backend.parts(x, parts, 10.0)
    exact = exl3_parts_apart([linear_in_double(x, part) for part in parts], 10.0)
    print("equal bits:", float((found == wanted).float().mean()))
    assert error(found, exact) < 1.05 * error(wanted, exact)
    assert error(found, wanted) < 4e-3


def test_a_token_does_not_depend_on_its_neighbours(backend, generator):
    parts, x = matrices(4096, (1536, 512), generator), tokens_of(8, 4096, generator)
    dense = (torch.randn(320, 4096, device="cuda", generator=generator) / 64).bfloat16()
    whole = backend.parts(x, [*parts, dense])
    for row in range(8):
        assert torch.equal(backend.parts(x[row : row + 1], [*parts, dense])[0], whole[row])


def test_a_captured_graph_replays_the_same_bits(backend, generator):
    parts = [backend.prepare_linear(part) for part in matrices(4096, (2048, 2048), generator)]
    dense = (torch.randn(320, 4096, device="cuda", generator=generator) / 64).bfloat16()
    x = tokens_of(1, 4096, generator)
    calls = ((parts, None), ([*parts, dense], None), (parts, 10.0))
    eager = [backend.parts(x, *call) for call in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [backend.parts(x, *call) for call in calls]
    for _ in range(3):
        graph.replay()
        for found, wanted in zip(captured, eager, strict=True):
            assert torch.equal(found, wanted)


def test_the_operation_has_a_true_fake(generator):
    from glm_exl3.ops import library

    assert library
    one, two = matrices(256, (128, 128), generator)
    tensors = [m for part in (one, two) for m in (part.trellis, part.suh, part.svh)]
    x = tokens_of(2, 256, generator)
    for limit in (None, 10.0):
        torch.library.opcheck(
            torch.ops.glm_exl3.exl3_parts.default,
            (x, tensors, [MUL1.value] * 2, limit, "cuda"),
            test_utils=("test_schema", "test_faketensor"),
        )
