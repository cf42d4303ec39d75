"""How calls run: same bits again, neighbours, graphs, streams, devices."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import (
    LIMIT,
    LINEAR_TOLERANCE,
    MCG,
    MOE_TOLERANCE,
    MUL1,
    error,
    linear_in_double,
    moe_in_double,
    random_stacks,
)

from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix
from kernels.inputs import Routed, random_matrix, random_routing

RATES = [(MCG, 64), (MUL1, 48), (MCG, 96)]


@pytest.mark.parametrize("tokens", [1, 7, 64, 200, 1000])
@pytest.mark.parametrize(("codebook", "last_dim"), RATES)
def test_moe_repeats_bit_for_bit(backend, generator, codebook, last_dim, tokens):
    prepared = backend.prepare_moe(*random_stacks(generator, 16, 512, 256, last_dim, codebook))
    call = random_routing(tokens, 512, 16, 8, generator)
    first = backend.moe(call.x, call.ids, call.weights, *prepared, LIMIT)
    for _ in range(5):
        assert torch.equal(first, backend.moe(call.x, call.ids, call.weights, *prepared, LIMIT))


@pytest.mark.parametrize("tokens", [1, 7, 64, 200])
@pytest.mark.parametrize(("codebook", "last_dim"), RATES)
def test_linear_repeats_bit_for_bit(backend, generator, codebook, last_dim, tokens):
    matrix = random_matrix(2048, 512, last_dim, codebook, generator)
    x = torch.randn(tokens, 2048, device="cuda", generator=generator).bfloat16()
    first = backend.linear(x, matrix)
    for _ in range(5):
        assert torch.equal(first, backend.linear(x, matrix))


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("intermediate", [256, 2048])
@pytest.mark.parametrize(("codebook", "last_dim"), RATES)
def test_few_tokens_do_not_feel_their_neighbours(
    backend, generator, codebook, last_dim, intermediate, same
):
    stacks = random_stacks(generator, 16, 512, intermediate, last_dim, codebook, same_suh=same)
    prepared = backend.prepare_moe(*stacks)
    call = random_routing(8, 512, 16, 8, generator)
    together = backend.moe(call.x, call.ids, call.weights, *prepared, LIMIT)
    for begin, end in ((0, 1), (0, 2), (3, 8), (7, 8)):
        part = slice(begin, end)
        alone = backend.moe(call.x[part], call.ids[part], call.weights[part], *prepared, LIMIT)
        assert torch.equal(alone, together[part])


@pytest.mark.parametrize("shape", [(512, 256), (4096, 1024), (8192, 512)])
@pytest.mark.parametrize(("codebook", "last_dim"), RATES)
def test_few_rows_do_not_feel_their_neighbours(backend, generator, codebook, last_dim, shape):
    matrix = random_matrix(*shape, last_dim, codebook, generator)
    x = torch.randn(8, shape[0], device="cuda", generator=generator).bfloat16()
    x[4] *= 1000
    together = backend.linear(x, matrix)
    for begin, end in ((0, 1), (0, 2), (3, 8), (7, 8)):
        assert torch.equal(backend.linear(x[begin:end], matrix), together[begin:end])


@pytest.mark.parametrize("tokens", [1, 8, 64, 200])
def test_moe_graphs_follow_their_inputs(backend, generator, tokens):
    w13, w2 = random_stacks(generator, 16, 512, 256, 64, MCG)
    prepared = backend.prepare_moe(w13, w2)
    call = random_routing(tokens, 512, 16, 8, generator)
    backend.moe(call.x, call.ids, call.weights, *prepared, LIMIT)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.moe(call.x, call.ids, call.weights, *prepared, LIMIT)
    for _ in range(3):
        other = random_routing(tokens, 512, 16, 8, generator)
        call.x.copy_(other.x)
        call.ids.copy_(other.ids)
        call.weights.copy_(other.weights)
        graph.replay()
        assert error(out, moe_in_double(call, w13, w2)) < MOE_TOLERANCE
        eager = backend.moe(call.x, call.ids, call.weights, *prepared, LIMIT)
        assert torch.equal(out, eager)


@pytest.mark.parametrize("tokens", [1, 8, 64, 200])
def test_linear_graphs_follow_their_inputs_without_a_call_before(backend, generator, tokens):
    matrix = backend.prepare_linear(random_matrix(2048, 384, 64, MCG, generator))
    x = torch.randn(tokens, 2048, device="cuda", generator=generator).bfloat16()
    if tokens > backend.STREAMED_TOKENS:
        torch.matmul(x, x.T)  # the vendor's library makes its handle outside of captures
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.linear(x, matrix)
    for _ in range(3):
        x.copy_(torch.randn(x.shape, device="cuda", generator=generator))
        graph.replay()
        assert error(out, linear_in_double(x, matrix)) < LINEAR_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 8, 100, 300])
def test_two_streams_do_not_disturb_each_other(backend, generator, tokens):
    prepared = backend.prepare_moe(*random_stacks(generator, 16, 512, 256, 64, MCG))
    matrix = backend.prepare_linear(random_matrix(2048, 512, 64, MUL1, generator))
    calls = [random_routing(tokens, 512, 16, 8, generator) for _ in range(2)]
    inputs = [torch.randn(tokens, 2048, device="cuda", generator=generator) for _ in calls]

    def both(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        call = calls[i]
        routed = backend.moe(call.x, call.ids, call.weights, *prepared, LIMIT)
        return routed, backend.linear(inputs[i].bfloat16(), matrix)

    wanted = [both(i) for i in (0, 1)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(both(i))
    torch.cuda.synchronize()
    for i in (0, 1):
        for results in found[i]:
            assert all(torch.equal(r, w) for r, w in zip(results, wanted[i], strict=True))


@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_a_graph_may_replay_beside_eager_calls(backend, generator, tokens):
    prepared = backend.prepare_moe(*random_stacks(generator, 16, 512, 256, 64, MCG))
    calls = [random_routing(tokens, 512, 16, 8, generator) for _ in range(2)]

    def run(call: Routed) -> torch.Tensor:
        return backend.moe(call.x, call.ids, call.weights, *prepared, LIMIT)

    wanted = [run(call) for call in calls]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run(calls[0])
    beside, eager = torch.cuda.Stream(), []
    beside.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        graph.replay()
        with torch.cuda.stream(beside):
            eager.append(run(calls[1]))
    torch.cuda.synchronize()
    assert torch.equal(replayed, wanted[0])
    assert all(torch.equal(result, wanted[1]) for result in eager)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs an NVIDIA GPU beside the first one"
)
@pytest.mark.parametrize("tokens", [1, 8, 64, 200])
def test_tensors_choose_the_device(backend, generator, tokens):
    """The current device is the first one; everything below lives on the second."""
    stacks = random_stacks(generator, 8, 256, 128, 64, MCG)
    call = random_routing(tokens, 256, 8, 4, generator)
    matrix = random_matrix(256, 384, 64, MUL1, generator)
    wanted = moe_in_double(call, *stacks), linear_in_double(call.x, matrix)

    def there(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.to("cuda:1") for tensor in tensors)

    moved = [Exl3Stack(*there(w.trellis, w.suh, w.svh), w.codebook) for w in stacks]
    other = Routed(*there(call.x, call.ids, call.weights))
    routed = backend.moe(other.x, other.ids, other.weights, *backend.prepare_moe(*moved), LIMIT)
    dense = PackedMatrix(*there(matrix.trellis, matrix.suh, matrix.svh), MUL1)
    assert error(routed.to("cuda:0"), wanted[0]) < MOE_TOLERANCE
    assert error(backend.linear(other.x, dense).to("cuda:0"), wanted[1]) < LINEAR_TOLERANCE
    assert torch.cuda.current_device() == 0
