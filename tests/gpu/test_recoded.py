"""Products with 8-bit rows: every path against float64, at all numbers of tokens."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import error

from glm_exl3.ops import recoded

OUTPUT_TOLERANCE = 3e-3
ACTIVATION_TOLERANCE = 4e-2  # where activations become e4m3, too
SHAPES = [(4096, 2048), (1536, 16384), (64, 16), (192, 40), (6144, 4096), (8192, 130)]
FEW = [1, 2, 3, 5, 8, 9, 16]
OTHERS = [
    ("fp8", recoded.ROWS), ("fp8", recoded.SCALED), ("fp8", recoded.WIDENED),
    ("int8", recoded.ROWS), ("int8", recoded.WIDENED),
]  # fmt: skip


@pytest.fixture(params=["fp8", "int8"])
def scheme(request):
    return request.param


def codes_of(scheme, n, k, generator):
    """Rows of every magnitude, among them one of zeros and one with the smallest codes."""
    weight = torch.randn(n, k, device="cuda", generator=generator)
    weight *= torch.logspace(-3, 1, n, device="cuda")[:, None]
    weight[n // 2] = 0
    weight[0, 1:] *= 2**-9
    return recoded.encode_rows(weight.bfloat16(), scheme)


def in_double(x, matrix):
    codes = matrix.codes.float().double() if matrix.scheme == "fp8" else matrix.codes.double()
    return x.double() @ (codes * matrix.scale.double()[:, None]).T


@pytest.mark.parametrize("tokens", FEW)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_few_tokens_take_the_kernel(backend, generator, scheme, k, n, tokens):
    matrix = codes_of(scheme, n, k, generator)
    x = torch.randn(tokens, k, device="cuda", generator=generator).bfloat16()
    assert recoded.can_stream(x)
    wanted = in_double(x, matrix)
    found = recoded.by_path(x, matrix, recoded.STREAMED)
    assert found.dtype is torch.bfloat16 and error(found, wanted) < OUTPUT_TOLERANCE
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=1e-5 * float(wanted.max()))
    assert torch.equal(recoded.linear(x, matrix), found)


def test_every_code_is_exact(backend, scheme):
    """One input is one and the others zero, so each product is one code."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).cuda()
    if scheme == "fp8":
        every[[0x7F, 0xFF]] = 0  # NaN
    dtype = torch.float8_e4m3fn if scheme == "fp8" else torch.int8
    codes = every.repeat(64, 1).T.contiguous().view(dtype)  # [256, 64], a code a row
    matrix = recoded.RowCodes(scheme, codes, torch.ones(256, device="cuda"))
    for column in (0, 1, 2, 3, 17, 63):
        x = torch.zeros(1, 64, device="cuda", dtype=torch.bfloat16)
        x[0, column] = 1
        found = recoded.by_path(x, matrix, recoded.STREAMED)
        assert torch.equal(found[0].float(), codes[:, 0].float())


def test_each_column_meets_its_own_input(backend, generator, scheme):
    codes = torch.zeros(64, 128, device="cuda")
    codes[torch.arange(64), torch.arange(64) * 2 + 1] = 1
    dtype = torch.float8_e4m3fn if scheme == "fp8" else torch.int8
    matrix = recoded.RowCodes(scheme, codes.to(dtype), torch.ones(64, device="cuda"))
    x = torch.randn(8, 128, device="cuda", generator=generator).bfloat16()
    assert torch.equal(recoded.by_path(x, matrix, recoded.STREAMED), x[:, 1::2])


def test_a_token_does_not_depend_on_its_neighbours(backend, generator, scheme):
    matrix = codes_of(scheme, 1536, 4096, generator)
    x = torch.randn(8, 4096, device="cuda", generator=generator).bfloat16()
    together = recoded.linear(x, matrix)
    for tokens in (1, 2, 5):
        assert torch.equal(recoded.linear(x[:tokens], matrix), together[:tokens])
    assert torch.equal(recoded.linear(x, matrix), together)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 64, 65, 300])
@pytest.mark.parametrize(("made", "path"), OTHERS)
def test_other_paths(backend, generator, made, path, tokens):
    if path == recoded.SCALED:
        pytest.importorskip("vllm", reason="needs vLLM's product of e4m3 by e4m3")
        if torch.cuda.get_device_capability() < recoded.NATIVE_FP8:
            pytest.skip("needs a GPU with e4m3")
    matrix = codes_of(made, 512, 1024, generator)
    x = torch.randn(tokens, 1024, device="cuda", generator=generator).bfloat16()
    limit = ACTIVATION_TOLERANCE if path == recoded.SCALED else 2 * OUTPUT_TOLERANCE
    assert error(recoded.by_path(x, matrix, path), in_double(x, matrix)) < limit


@pytest.mark.parametrize(("tokens", "k", "dtype"), [
    (17, 1024, torch.bfloat16), (1, 1008, torch.bfloat16), (1, 1024, torch.float16),
])  # fmt: skip
def test_what_the_kernel_cannot_serve_takes_another_path(
    backend, generator, scheme, tokens, k, dtype
):
    matrix = codes_of(scheme, 256, k, generator)
    x = torch.randn(tokens, k, device="cuda", generator=generator).to(dtype)
    assert not recoded.can_stream(x)
    path = recoded.path_for(matrix, torch.cuda.get_device_capability(), tokens)
    limit = ACTIVATION_TOLERANCE if path == recoded.SCALED else 2 * OUTPUT_TOLERANCE
    assert error(recoded.linear(x, matrix), in_double(x, matrix)) < limit


def test_a_graph_replays_it(backend, generator, scheme):
    matrix = codes_of(scheme, 512, 2048, generator)
    x = torch.randn(4, 2048, device="cuda", generator=generator).bfloat16()
    wanted = recoded.linear(x, matrix)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = recoded.linear(x, matrix)
    y.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, wanted)
