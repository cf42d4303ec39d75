"""Products with rows of bf16: the kernel against float64, where it reads, and how calls run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_cases import error

from glm_exl3.ops import dense_rows

TOLERANCE = 3e-3
ONE_ROUNDING = 2**-8  # of bf16: the error of so few numbers may be that of the largest
FEW_NUMBERS = 16
# k, n: short rows, few rows, others; with last blocks that are not full.
SHAPES = [
    (64, 8192), (128, 8192), (192, 40), (256, 77),
    (4096, 16), (4096, 64), (4096, 144), (4096, 320), (1536, 1050), (544, 9),
    (4096, 4096), (6144, 4096), (1536, 16384), (512, 1100),
]  # fmt: skip
FEW = [1, 2, 3, 5, 8, 9, 16]
KINDS = [(128, 1000), (4096, 320), (4096, 1536)]  # one shape of every kernel


def drawn(generator, *shape):
    return torch.randn(*shape, device="cuda", generator=generator).bfloat16()


def rows_of(generator, n, k):
    """Rows of every magnitude, among them one of zeros."""
    weight = torch.randn(n, k, device="cuda", generator=generator)
    weight *= torch.logspace(-3, 1, n, device="cuda")[:, None]
    weight[n // 2] = 0
    return weight.bfloat16()


@pytest.mark.parametrize("tokens", FEW)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_few_tokens_take_the_kernel(backend, generator, k, n, tokens):
    x, weight = drawn(generator, tokens, k), rows_of(generator, n, k)
    assert dense_rows.can_serve(x, weight)
    wanted = x.double() @ weight.double().T
    found = dense_rows.linear(x, weight)
    bound = TOLERANCE if found.numel() >= FEW_NUMBERS else ONE_ROUNDING
    assert found.dtype is torch.bfloat16 and error(found, wanted) < bound
    floor = 1e-5 * float(wanted.abs().max())
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=floor)


@pytest.mark.parametrize("tokens", FEW)
@pytest.mark.parametrize(("k", "n"), [(4096, 288), (1536, 256), (128, 1100)])
def test_logits_are_those_rows_in_either_type(backend, generator, k, n, tokens):
    x, weight = drawn(generator, tokens, k), rows_of(generator, n, k)
    wanted = x.double() @ weight.double().T
    found = dense_rows.logits(x, weight, torch.float32)
    floor = 1e-5 * float(wanted.abs().max())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=floor)
    assert torch.equal(found.bfloat16(), dense_rows.linear(x, weight))
    assert torch.equal(dense_rows.logits(x, weight, torch.bfloat16), found.bfloat16())


def test_logits_of_many_tokens_and_other_types_are_left_to_the_caller(backend, generator):
    x, weight = drawn(generator, 17, 4096), rows_of(generator, 288, 4096)
    assert dense_rows.logits(x, weight, torch.float32) is None
    assert dense_rows.logits(x[:16], weight, torch.float16) is None


@pytest.mark.parametrize(("k", "n"), KINDS)
def test_a_token_does_not_depend_on_its_neighbours(backend, generator, k, n):
    x, weight = drawn(generator, 16, k), rows_of(generator, n, k)
    x[4] *= 1000
    together = dense_rows.linear(x, weight)
    for begin, end in ((0, 1), (0, 2), (3, 8), (0, 8), (7, 8), (8, 16), (2, 13)):
        assert torch.equal(dense_rows.linear(x[begin:end], weight), together[begin:end])
    for _ in range(5):
        assert torch.equal(dense_rows.linear(x, weight), together)


@pytest.mark.parametrize("k", [64, 128, 576, 4096])
@pytest.mark.parametrize("tokens", [8, 16])
def test_each_column_meets_its_own_input(backend, generator, k, tokens):
    x = drawn(generator, tokens, k)
    assert torch.equal(dense_rows.linear(x, torch.eye(k, device="cuda").bfloat16()), x)


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize(("k", "n"), KINDS)
def test_slices_are_read_in_place(backend, generator, k, n, tokens):
    """Columns of wider tokens, and rows of a larger matrix; what lies around them is NaN."""
    wide = torch.full((tokens, k + 264), torch.nan, device="cuda", dtype=torch.bfloat16)
    tall = torch.full((n + 5, k), torch.nan, device="cuda", dtype=torch.bfloat16)
    x, weight = wide[:, 64 : 64 + k], tall[2 : 2 + n]
    x.copy_(drawn(generator, tokens, k))
    weight.copy_(rows_of(generator, n, k))
    assert dense_rows.can_serve(x, weight)
    whole = dense_rows.linear(x.contiguous(), weight.clone())
    assert torch.equal(dense_rows.linear(x, weight), whole)
    assert torch.equal(dense_rows.linear(x[None], weight), whole[None])


@pytest.mark.parametrize(("tokens", "k", "dtype"), [
    (17, 1024, torch.bfloat16), (300, 1024, torch.bfloat16), (1, 1000, torch.bfloat16),
    (1, 1024, torch.float16), (2, 1024, torch.float32), (0, 1024, torch.bfloat16),
])  # fmt: skip
def test_what_the_kernel_cannot_serve_is_the_vendors(backend, generator, tokens, k, dtype):
    x = torch.randn(tokens, k, device="cuda", generator=generator).to(dtype)
    weight = torch.randn(256, k, device="cuda", generator=generator).to(dtype)
    assert not dense_rows.can_serve(x, weight)
    assert torch.equal(dense_rows.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(("k", "n"), KINDS)
def test_graphs_follow_their_inputs(backend, generator, k, n, tokens):
    x, weight = drawn(generator, tokens, k), rows_of(generator, n, k)
    dense_rows.linear(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dense_rows.linear(x, weight)
    for _ in range(3):
        x.copy_(drawn(generator, tokens, k))
        graph.replay()
        assert error(y, x.double() @ weight.double().T) < TOLERANCE
        assert torch.equal(y, dense_rows.linear(x, weight))


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_chain_starts_early_and_waits_for_its_inputs(backend, generator, tokens):
    """Each product reads what the one before it, of another shape, has just written."""
    shapes = [(4096, 320), (320, 4096), (4096, 4096), (4096, 128), (128, 8192), (8192, 4096)]
    weights = [drawn(generator, n, k) / k**0.5 for k, n in shapes]
    x = drawn(generator, tokens, 4096)

    def chain(wait: bool) -> torch.Tensor:
        y = x
        for weight in weights * 3:
            y = dense_rows.linear(y, weight)
            if wait:
                torch.cuda.synchronize()
        return y

    wanted = chain(wait=True)
    for _ in range(10):
        assert torch.equal(chain(wait=False), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(wait=False)
    for _ in range(10):
        y.zero_()
        graph.replay()
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_two_streams_do_not_disturb_each_other(backend, generator, tokens):
    weights = [rows_of(generator, n, k) for k, n in KINDS]
    inputs = [[drawn(generator, tokens, k) for k, _ in KINDS] for _ in range(2)]

    def all_of(i: int) -> list[torch.Tensor]:
        return [dense_rows.linear(x, w) for x, w in zip(inputs[i], weights, strict=True)]

    wanted = [all_of(i) for i in (0, 1)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in wanted]
    found: list[list[list[torch.Tensor]]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(all_of(i))
    torch.cuda.synchronize()
    for i in (0, 1):
        for results in found[i]:
            assert all(torch.equal(r, w) for r, w in zip(results, wanted[i], strict=True))


def test_a_compiled_graph_keeps_it_whole(backend, generator):
    x, weight = drawn(generator, 4, 256), rows_of(generator, 64, 256)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return dense_rows.linear(x, weight) * 2

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), twice(x))
