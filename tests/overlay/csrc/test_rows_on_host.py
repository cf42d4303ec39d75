"""Products with rows of codes or bf16: the kernel, compiled for the host, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from glm_exl3.ref import recode

KINDS = {"fp8": 0, "int8": 1, "bf16": 2}
# Rows shared by two warps, 8 rows a warp, 16 rows a warp: each with a last block that is not full.
SHAPES = [(64, 21), (128, 200), (192, 40), (256, 65), (320, 16), (4096, 9)]
# Only rows of bf16 may be any whole number of 32 columns.
SHAPES_BY_KIND = [(kind, *shape) for kind in KINDS for shape in SHAPES] + [
    ("bf16", 544, 1070),
    ("bf16", 608, 33),
]
Product = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def product(compiled: Callable[..., Callable[..., bytearray]]) -> Product:
    """out [tokens, n] of x [tokens, k] in rows of `stride` elements."""
    program = compiled("rows", "byte_rows.cu")

    def run(
        kind: str, x: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor, gap: int = 0,
        out: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:  # fmt: skip
        (tokens, k), n = x.shape, rows.shape[0]
        wide = torch.full((tokens, k + gap), torch.nan, dtype=torch.bfloat16)
        wide[:, :k] = x
        given = [wide, rows] if kind == "bf16" else [wide, rows, scale]
        numbers = {"tokens": tokens, "k": k, "n": n, "stride": k + gap, "kind": KINDS[kind]}
        written = program(tensors=given, floats=int(out is torch.float32), **numbers)
        return torch.frombuffer(written, dtype=out).reshape(tokens, n)

    return run


def made(kind: str, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of every magnitude and their scales."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k))
    weight *= torch.logspace(-3, 1, n)[:, None]
    if kind == "bf16":
        return weight.bfloat16(), torch.ones(n)
    return recode.quantize_rows(weight.bfloat16(), kind)


def inputs(tokens: int, k: int) -> torch.Tensor:
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(tokens)).bfloat16()


@pytest.mark.parametrize(("kind", "k", "n"), SHAPES_BY_KIND)
def test_the_kernel_multiplies(product: Product, kind: str, k: int, n: int) -> None:
    rows, scale = made(kind, n, k)
    for tokens, gap in ((1, 0), (3, 8), (8, 0), (9, 24), (16, 0)):
        x = inputs(tokens, k)
        wanted = x.double() @ (rows.float().double() * scale.double()[:, None]).T
        found = product(kind, x, rows, scale, gap)
        floor = 1e-5 * float(wanted.abs().max())
        torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=floor)


@pytest.mark.parametrize(("k", "n"), [(128, 200), (4096, 9), (4096, 288)])
def test_rows_of_bf16_give_logits_in_fp32(product: Product, k: int, n: int) -> None:
    rows, scale = made("bf16", n, k)
    for tokens in (1, 8, 16):
        x = inputs(tokens, k)
        wanted = x.double() @ rows.double().T
        found = product("bf16", x, rows, scale, out=torch.float32)
        floor = 1e-6 * float(wanted.abs().max())
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=floor)
        assert torch.equal(found.bfloat16(), product("bf16", x, rows, scale))


@pytest.mark.parametrize(("k", "n"), [(128, 72), (1024, 24), (1024, 1072)])
def test_tokens_of_bf16_have_the_bits_of_one_alone(product: Product, k: int, n: int) -> None:
    rows, scale = made("bf16", n, k)
    x = inputs(16, k)
    whole = product("bf16", x, rows, scale)
    for first, last in ((0, 1), (2, 5), (8, 16), (3, 14)):
        assert torch.equal(product("bf16", x[first:last], rows, scale), whole[first:last])


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("k", [64, 128, 576])
def test_each_column_meets_its_own_input(product: Product, kind: str, k: int) -> None:
    """One row a column: ones where the input of that column shall come out."""
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "bf16": torch.bfloat16}[kind]
    x = inputs(2, k)
    assert torch.equal(product(kind, x, torch.eye(k).to(dtype), torch.ones(k)), x)
