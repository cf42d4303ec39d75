"""Which launches several matrices take, with the compiled operations replaced by stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ops import cuda_backend, dense_rows, reference, tuning
from glm_exl3.ops.matrix import PackedMatrix
from glm_exl3.ops.tuning import Step
from glm_exl3.ref.linear import exl3_parts_apart

MCG, MUL1 = Codebook.MCG, Codebook.MUL1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """(widths, first columns, dense rows, limit) of every launch; ones stand for products."""
    found: list[tuple] = []

    def linear_parts(x, trellis, suh, svh, code, dense, columns, splits, limit, counters, *rest):
        rows = None if dense is None else dense.shape[0]
        found.append(([t.shape[1] * 16 for t in trellis], list(columns), rows, limit))
        assert len(suh) == len(svh) == len(splits) == len(counters) == len(trellis)
        rest[1].fill_(1.0)

    ops = SimpleNamespace(
        linear_parts=linear_parts,
        linear_decode_workspace=lambda *a: 16,
        linear_decode_counters=lambda *a: 1,
    )
    monkeypatch.setattr(cuda_backend, "_ops", lambda: ops)
    monkeypatch.setattr(cuda_backend, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_backend, "_zeroed_counters", lambda *a: torch.zeros(1))
    monkeypatch.setattr(cuda_backend, "linear", linear)
    monkeypatch.setattr(cuda_backend, "dequant", reference.dequant)
    monkeypatch.setattr(tuning, "plan", lambda *a: (Step("streamed", 8, 4), Step("decoded")))
    return found


def linear(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """The back end's, with the reference in place of the streaming kernel."""
    if cuda_backend.streamed(matrix, x.numel() // x.shape[-1]) is None:
        return torch.matmul(x, reference.dequant(matrix, x.dtype))
    return reference.linear(x, matrix)


def random_matrix(n: int, last_dim: int = 64) -> PackedMatrix:
    random = torch.Generator().manual_seed(n)
    bits = torch.randint(-(2**15), 2**15, (8, n // 16, last_dim), generator=random)
    scales = torch.randn(n, generator=random).half()
    return PackedMatrix(bits.to(torch.int16), torch.ones(128).half(), scales, MUL1)


def matrix(n: int, last_dim: int = 64, codebook: Codebook = MCG) -> PackedMatrix:
    trellis = torch.zeros(8, n // 16, last_dim, dtype=torch.int16)
    return PackedMatrix(trellis, torch.ones(128).half(), torch.ones(n).half(), codebook)


def tokens(count: int) -> torch.Tensor:
    return torch.ones(count, 128, dtype=torch.bfloat16)


def test_parts_of_one_rate_take_one_launch(launches):
    y = cuda_backend.parts(tokens(3), [matrix(128), matrix(256)])
    assert launches == [([128, 256], [0, 128], None, None)]
    assert y.shape == (3, 384)
    assert y.min() == 1


def test_leading_dimensions_stay(launches):
    x = torch.ones(2, 4, 128)
    assert cuda_backend.parts(x, [matrix(128), matrix(256)]).shape == (2, 4, 384)


def test_rates_and_codebooks_take_launches_of_their_own(launches):
    cuda_backend.parts(
        tokens(1), [matrix(128), matrix(256, 80), matrix(128), matrix(128, 80, MUL1)]
    )
    assert launches == [
        ([128, 128], [0, 384], None, None),
        ([256], [128], None, None),
        ([128], [512], None, None),
    ]


def test_five_parts_take_two(launches):
    cuda_backend.parts(tokens(1), [matrix(128)] * 5)
    assert [columns for _, columns, _, _ in launches] == [[0, 128, 256, 384], [512]]


def test_dense_rows_ride_with_the_first(launches):
    dense = torch.zeros(24, 128, dtype=torch.bfloat16)
    assert cuda_backend.parts(tokens(8), [dense, matrix(256)]).shape == (8, 280)
    assert launches == [([256], [24, 0], 24, None)]


def test_gate_and_up_take_one(launches):
    assert cuda_backend.parts(tokens(8), [matrix(256)] * 2, 10.0).shape == (8, 256)
    assert launches == [([256, 256], [0, 256], None, 10.0)]


@pytest.mark.parametrize(
    ("count", "parts", "limit"),
    [
        (9, [matrix(128), matrix(256)], None),
        (2, [matrix(128), matrix(256, 112)], None),
        (2, [matrix(128), torch.zeros(24, 128)], None),
        (2, [matrix(128), torch.zeros(6, 128, dtype=torch.bfloat16)], None),
        (2, [torch.zeros(24, 128, dtype=torch.bfloat16)] * 2, None),
        (2, [matrix(256), matrix(256, 80)], 10.0),
        (9, [matrix(256), matrix(256)], 10.0),
    ],
)
def test_what_the_kernel_does_not_take_is_multiplied_apart(launches, count, parts, limit):
    dtypes = [p.dtype for p in parts if isinstance(p, torch.Tensor)] or [torch.bfloat16]
    x = tokens(count).to(dtypes[0])
    found = cuda_backend.parts(x, parts, limit)
    assert launches == []
    assert torch.equal(found, exl3_parts_apart(each(x, parts), limit))


def each(x, parts):
    return [x @ p.t() if isinstance(p, torch.Tensor) else linear(x, p) for p in parts]


@pytest.fixture
def laid_together(monkeypatch):
    """How many products every `torch.cat` was given."""
    found, cat = [], torch.cat

    def counted(tensors, *args, **kwargs):
        found.append(len(tensors))
        return cat(tensors, *args, **kwargs)

    monkeypatch.setattr(torch, "cat", counted)
    return found


@pytest.mark.parametrize("lead", [(9,), (65,), (2, 40)])
@pytest.mark.parametrize("call", [cuda_backend.parts, cuda_backend.side_by_side])
def test_many_tokens_go_straight_into_their_columns(launches, laid_together, call, lead):
    dense = torch.randn(24, 128).bfloat16()
    parts, x = [random_matrix(256), dense, random_matrix(128, 80)], torch.randn(*lead, 128)
    x = x.bfloat16()
    wanted = torch.cat(each(x, parts), dim=-1)
    laid_together.clear()
    found = call(x, parts)
    assert torch.equal(found, wanted)
    assert found.is_contiguous()
    assert launches == laid_together == []


@pytest.mark.parametrize(("count", "rows"), [(8, 24), (0, 24), (65, 6)])
def test_streamed_or_unaligned_products_are_laid_together(launches, laid_together, count, rows):
    """Few tokens, or a width that would cost the vendor its best kernel."""
    parts = [random_matrix(256), torch.randn(rows, 128).bfloat16()]
    x = torch.randn(count, 128).bfloat16()
    wanted = torch.cat(each(x, parts), dim=-1)
    laid_together.clear()
    assert torch.equal(cuda_backend.side_by_side(x, parts), wanted)
    assert laid_together == [2]
    assert launches == []


def test_rows_of_its_own_stay_where_they_can_be_served(launches, monkeypatch):
    """`dense_rows` decides by the number of tokens; a part that it takes is laid beside."""
    asked = []

    def served(x, weight):
        asked.append(x.shape[0])
        return x @ weight.t()

    monkeypatch.setattr(dense_rows, "can_serve", lambda x, weight: x.shape[0] <= 16)
    monkeypatch.setattr(dense_rows, "linear", served)
    parts = [random_matrix(256), torch.randn(24, 128).bfloat16()]
    for count in (1, 16, 17):
        x = torch.randn(count, 128).bfloat16()
        wanted = torch.cat(each(x, parts), dim=-1)
        assert torch.equal(cuda_backend.side_by_side(x, parts, own_rows=True), wanted)
    assert asked == [1, 16]


def test_no_tokens(launches):
    assert cuda_backend.parts(tokens(0), [matrix(128), matrix(256)]).shape == (0, 384)
    assert launches == []
