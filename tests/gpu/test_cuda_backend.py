"""The CUDA back end against the reference in float64, on fresh random weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from glm_exl3.format.layout import Codebook
from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix
from glm_exl3.ref.decode import decode_rotated, dequantize
from glm_exl3.ref.encode import encode_tiles as reference_encode
from glm_exl3.ref.hadamard import had128
from glm_exl3.ref.linear import exl3_linear
from glm_exl3.ref.moe import exl3_moe
from kernels.inputs import random_matrix, random_routing, random_stack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MCG, MUL1, INST3 = Codebook.MCG, Codebook.MUL1, Codebook.INST3
LINEAR_TOLERANCE, MOE_TOLERANCE = 3e-3, 5e-3
ALL_RATES = [(c, 16 * k) for c in Codebook for k in range(1, 9)] + [(MUL1, d) for d in (24, 40, 56)]


@pytest.fixture
def backend():
    from glm_exl3.ops import cuda_backend

    return cuda_backend


@pytest.fixture
def generator():
    made = torch.Generator("cuda")
    made.seed()
    return made


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative Frobenius error; NaN never passes a comparison."""
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm())


def poison(size_bytes: int) -> None:
    """Leave NaN patterns in memory that the next allocations reuse."""
    torch.full((size_bytes,), 0xFF, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize(("codebook", "last_dim"), ALL_RATES)
def test_dequant_is_exact_before_and_close_after_the_rotations(
    backend, generator, codebook, last_dim
):
    matrix = random_matrix(256, 384, last_dim, codebook, generator)
    inner = torch.full((256, 384), torch.nan, dtype=torch.float16, device="cuda")
    code = backend._CODES[codebook]
    backend._ops().dequant(matrix.trellis, None, None, code, inner)
    assert torch.equal(inner, decode_rotated(matrix.trellis, codebook))
    wanted = dequantize(matrix.trellis, matrix.suh, matrix.svh, codebook, torch.float64)
    assert error(backend.dequant(matrix, torch.float32), wanted) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_had128_matches_the_reference(backend, generator, dtype):
    x = torch.randn(5, 384, device="cuda", generator=generator).to(dtype)
    pre = torch.randn(384, device="cuda", generator=generator).half()
    wanted = had128(x.double() * pre.double())
    assert error(backend.had128(x, pre), wanted) < 4e-3


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 31, 64, 65, 300])
@pytest.mark.parametrize(("codebook", "last_dim"), ALL_RATES)
def test_linear_matches_the_reference(backend, generator, codebook, last_dim, tokens):
    matrix = random_matrix(640, 384, last_dim, codebook, generator)
    x = torch.randn(tokens, 640, device="cuda", generator=generator).bfloat16()
    poison(1 << 22)
    wanted = exl3_linear(x.double(), matrix.trellis, matrix.suh, matrix.svh, codebook)
    assert error(backend.linear(x, matrix), wanted) < LINEAR_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 8])
def test_linear_survives_outliers(backend, generator, tokens):
    matrix = random_matrix(1024, 256, 64, MCG, generator)
    x = torch.randn(tokens, 1024, device="cuda", generator=generator).bfloat16()
    x[0, 7] = 1e4
    wanted = exl3_linear(x.double(), matrix.trellis, matrix.suh, matrix.svh, MCG)
    assert error(backend.linear(x, matrix), wanted) < LINEAR_TOLERANCE


def test_row_shards_sum_to_the_whole(backend, generator):
    matrix = random_matrix(768, 256, 64, MCG, generator)
    x = torch.randn(4, 768, device="cuda", generator=generator)
    parts = [
        PackedMatrix(matrix.trellis[b // 16 : e // 16], matrix.suh[b:e], matrix.svh, MCG)
        for b, e in ((0, 384), (384, 768))
    ]
    total = backend.linear(x[:, :384].contiguous(), parts[0])
    total = total + backend.linear(x[:, 384:].contiguous(), parts[1])
    assert error(total, exl3_linear(x.double(), matrix.trellis, matrix.suh, matrix.svh, MCG)) < 1e-3


def stacks(generator, experts, hidden, intermediate, bits, codebook, same_suh):
    w13 = random_stack(
        (experts, 2), hidden, intermediate, 16 * bits, codebook, generator, same_suh=same_suh
    )
    w2 = random_stack((experts,), intermediate, hidden, 16 * bits, codebook, generator)
    return w13, w2


@pytest.mark.parametrize(("tokens", "same"), [(1, True), (5, False), (64, True), (200, False)])
@pytest.mark.parametrize("codebook", [MCG, MUL1])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_moe_matches_the_reference(backend, generator, bits, codebook, tokens, same):
    w13, w2 = stacks(generator, 16, 512, 384, bits, codebook, same)
    call = random_routing(tokens, 512, 16, 8, generator)
    poison(1 << 24)
    prepared = backend.prepare_moe(w13, w2)
    found = backend.moe(call.x, call.ids, call.weights, *prepared, 10.0)
    wanted = exl3_moe(call.x.double(), call.ids, call.weights, w13, w2, 10.0)
    assert error(found, wanted) < MOE_TOLERANCE


@pytest.mark.parametrize("codebook_bits", [(INST3, 64), (MCG, 128), (MUL1, 40)])
def test_moe_of_other_rates_takes_the_general_way(backend, generator, codebook_bits):
    codebook, last_dim = codebook_bits
    w13 = random_stack((4, 2), 256, 128, last_dim, codebook, generator)
    w2 = random_stack((4,), 128, 256, last_dim, codebook, generator)
    call = random_routing(5, 256, 4, 2, generator)
    found = backend.moe(call.x, call.ids, call.weights, *backend.prepare_moe(w13, w2), 10.0)
    wanted = exl3_moe(call.x.double(), call.ids, call.weights, w13, w2, 10.0)
    assert error(found, wanted) < 2 * MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [20, 200])
def test_moe_with_an_expert_map_adds_local_experts_only(backend, generator, tokens):
    w13, w2 = stacks(generator, 11, 512, 256, 4, MCG, True)
    expert_map = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    expert_map[::6] = torch.arange(11, dtype=torch.int32, device="cuda")
    call = random_routing(tokens, 512, 64, 8, generator)
    poison(1 << 24)
    prepared = backend.prepare_moe(w13, w2)
    found = backend.moe(call.x, call.ids, call.weights, *prepared, 10.0, expert_map)
    wanted = exl3_moe(call.x.double(), call.ids, call.weights, w13, w2, 10.0, expert_map)
    assert error(found, wanted) < MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [40, 700])
def test_moe_with_one_fat_and_many_empty_experts(backend, generator, tokens):
    w13, w2 = stacks(generator, 64, 256, 256, 4, MCG, True)
    call = random_routing(tokens, 256, 16, 4, generator, torch.float16)
    call.ids[:, 0] = 40
    found = backend.moe(call.x, call.ids, call.weights, *backend.prepare_moe(w13, w2), None)
    wanted = exl3_moe(call.x.double(), call.ids, call.weights, w13, w2, None)
    assert error(found, wanted) < MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_moe_repeats_bit_for_bit(backend, generator, tokens):
    prepared = backend.prepare_moe(*stacks(generator, 16, 512, 256, 4, MCG, True))
    call = random_routing(tokens, 512, 16, 8, generator)
    first = backend.moe(call.x, call.ids, call.weights, *prepared, 10.0)
    for _ in range(5):
        again = backend.moe(call.x, call.ids, call.weights, *prepared, 10.0)
        assert torch.equal(first, again)


def test_few_tokens_do_not_feel_their_neighbours(backend, generator):
    prepared = backend.prepare_moe(*stacks(generator, 16, 512, 256, 4, MCG, True))
    call = random_routing(8, 512, 16, 8, generator)
    together = backend.moe(call.x, call.ids, call.weights, *prepared, 10.0)
    for size in (2, 5):
        part = backend.moe(call.x[:size], call.ids[:size], call.weights[:size], *prepared, 10.0)
        assert torch.equal(part, together[:size])


@pytest.mark.parametrize("tokens", [1, 8, 64, 200])
def test_graph_replays_follow_their_inputs(backend, generator, tokens):
    w13, w2 = stacks(generator, 16, 512, 256, 4, MCG, True)
    prepared = backend.prepare_moe(w13, w2)
    call = random_routing(tokens, 512, 16, 8, generator)
    backend.moe(call.x, call.ids, call.weights, *prepared, 10.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.moe(call.x, call.ids, call.weights, *prepared, 10.0)
    for _ in range(2):
        other = random_routing(tokens, 512, 16, 8, generator)
        call.x.copy_(other.x)
        call.ids.copy_(other.ids)
        graph.replay()
        wanted = exl3_moe(call.x.double(), call.ids, call.weights, w13, w2, 10.0)
        assert error(out, wanted) < MOE_TOLERANCE


def test_two_streams_do_not_disturb_each_other(backend, generator):
    prepared = backend.prepare_moe(*stacks(generator, 16, 512, 256, 4, MCG, True))
    calls = [random_routing(8, 512, 16, 8, generator) for _ in range(2)]
    wanted = [backend.moe(c.x, c.ids, c.weights, *prepared, 10.0) for c in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                call = calls[i]
                found[i].append(backend.moe(call.x, call.ids, call.weights, *prepared, 10.0))
    torch.cuda.synchronize()
    for i in (0, 1):
        assert all(torch.equal(result, wanted[i]) for result in found[i])


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", range(1, 9))
def test_encoder_returns_the_bits_of_the_reference(generator, bits, codebook):
    from glm_exl3.ops.cuda_encode import encode_tiles

    tiles = torch.randn(37, 256, device="cuda", generator=generator)
    found = encode_tiles(tiles, bits, codebook)
    assert torch.equal(found, reference_encode(tiles, bits, codebook))


def test_prepare_keeps_unequal_scales(backend, generator):
    w13, w2 = stacks(generator, 4, 256, 128, 4, MCG, False)
    assert backend.prepare_moe(w13, w2)[0] is w13
    joined = Exl3Stack(w13.trellis, w13.suh[:, :1].expand(-1, 2, -1).contiguous(), w13.svh, MCG)
    assert backend.prepare_moe(joined, w2)[0].suh.shape == (4, 1, 256)
