"""The operations: schema and fake twins, and the reference back end against `ref`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ops import library, reference
from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix
from glm_exl3.ref.decode import dequantize
from glm_exl3.ref.encode import encode_tiles
from glm_exl3.ref.hadamard import had128
from glm_exl3.ref.moe import exl3_moe


def stack(lead: tuple[int, ...], k: int, n: int, bits: int = 2) -> Exl3Stack:
    random = torch.Generator().manual_seed(len(lead) + k + n)
    trellis = torch.randint(
        -(2**15), 2**15, (*lead, k // 16, n // 16, 16 * bits), generator=random, dtype=torch.int16
    )
    suh = torch.randn(*lead, k, generator=random).half()
    svh = (torch.randn(*lead, n, generator=random) / k**0.5).half()
    return Exl3Stack(trellis, suh, svh, Codebook.MUL1)


def matrix(k: int = 128, n: int = 256) -> PackedMatrix:
    s = stack((), k, n, 3)
    return PackedMatrix(s.trellis, s.suh, s.svh, s.codebook)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(0,), (1,), (2, 3)])
def test_linear_op_and_fake(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    m = matrix()
    x = torch.randn(*lead, 128, dtype=dtype)
    arguments = (x, m.trellis, m.suh, m.svh, m.codebook.value, "reference")
    torch.library.opcheck(
        torch.ops.glm_exl3.exl3_linear.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )
    y = library.linear(x, m, "reference")
    assert y.shape == (*lead, 256)
    assert y.dtype == dtype


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("lead", [(0,), (1,), (2, 3)])
def test_side_by_side_op_and_fake(lead: tuple[int, ...], own_rows: bool) -> None:
    m, dense = matrix(), torch.randn(24, 128)
    x = torch.randn(*lead, 128)
    tensors, kinds = [dense, m.trellis, m.suh, m.svh], ["dense", m.codebook.value]
    torch.library.opcheck(
        torch.ops.glm_exl3.exl3_side_by_side.default,
        (x, tensors, kinds, own_rows, "reference"),
        test_utils=("test_schema", "test_faketensor"),
    )
    y = library.side_by_side(x, [dense, m], own_rows, "reference")
    assert torch.equal(y, torch.cat([x @ dense.t(), library.linear(x, m, "reference")], dim=-1))


def test_dequant_op_and_fake() -> None:
    m = matrix()
    arguments = (m.trellis, m.suh, m.svh, m.codebook.value, torch.bfloat16, "reference")
    torch.library.opcheck(
        torch.ops.glm_exl3.exl3_dequant.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )
    want = dequantize(m.trellis, m.suh, m.svh, m.codebook).to(torch.bfloat16)
    assert torch.equal(library.dequant(m, torch.bfloat16, "reference"), want)


@pytest.mark.parametrize("scaled", [False, True])
def test_had128_op_and_fake(scaled: bool) -> None:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(3, 256, generator=random).bfloat16()
    pre, post = (torch.randn(256, generator=random).half() if scaled else None for _ in range(2))
    torch.library.opcheck(
        torch.ops.glm_exl3.had128.default,
        (x, pre, post, "reference"),
        test_utils=("test_schema", "test_faketensor"),
    )
    want = had128(x.double() * (pre.double() if scaled else 1)) * (post.double() if scaled else 1)
    got = library.had128(x, pre, post, "reference")
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-6)


def test_encode_op_and_fake() -> None:
    tiles = torch.randn(2, 256, generator=torch.Generator().manual_seed(6))
    torch.library.opcheck(
        torch.ops.glm_exl3.exl3_encode.default,
        (tiles, 2, "mcg", "reference"),
        test_utils=("test_schema", "test_faketensor"),
    )
    got = library.encode(tiles, 2, Codebook.MCG, "reference")
    assert torch.equal(got, encode_tiles(tiles, 2, Codebook.MCG))


def moe_case() -> tuple:
    w13, w2 = stack((3, 2), 128, 128), stack((3,), 128, 128)
    random = torch.Generator().manual_seed(9)
    x = torch.randn(5, 128, generator=random)
    ids = torch.stack([torch.randperm(3, generator=random)[:2] for _ in range(5)])
    return x, ids, torch.rand(5, 2, generator=random), w13, w2


def test_moe_op_and_fake() -> None:
    x, ids, weights, w13, w2 = moe_case()
    arguments = (
        x,
        ids,
        weights,
        *(w13.trellis, w13.suh, w13.svh, w13.codebook.value),
        *(w2.trellis, w2.suh, w2.svh, w2.codebook.value),
        0.5,
        None,
        "reference",
    )
    torch.library.opcheck(
        torch.ops.glm_exl3.exl3_moe.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )
    got = library.moe(x, ids, weights, w13, w2, limit=0.5, expert_map=None, backend="reference")
    torch.testing.assert_close(got, exl3_moe(x, ids, weights, w13, w2, 0.5))


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("tokens", [1, 5])
def test_decoded_experts_give_the_packed_product(limit: float | None, tokens: int) -> None:
    x, ids, weights, w13, w2 = moe_case()
    x, ids, weights = x[:tokens], ids[:tokens], weights[:tokens]
    expert_map = torch.tensor([1, -1, 0])
    dense = (reference.dense_experts(w13, x.dtype), reference.dense_experts(w2, x.dtype))
    for mapping in (None, expert_map):
        got = reference.dense_moe(x, ids, weights, *dense, limit, mapping)
        want = exl3_moe(x, ids, weights, w13, w2, limit, mapping)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_decoded_experts_round_once_to_bf16() -> None:
    *_, w13, _ = moe_case()
    dense = reference.dense_experts(w13, torch.bfloat16).weight
    assert dense.shape == (3, 256, 128)
    up = dequantize(w13.trellis[1, 1], w13.suh[1, 1], w13.svh[1, 1], w13.codebook)
    assert torch.equal(dense[1, 128:], up.T.to(torch.bfloat16))


@pytest.mark.parametrize("rows", [1, 4, 5, 33])
def test_few_rows_take_the_fp32_copy_and_give_the_same(rows: int) -> None:
    weight = torch.randn(64, 128).bfloat16()
    x = torch.randn(rows, 128).bfloat16()
    wide = reference.widen(weight)
    assert wide is not None
    got = reference.dense_linear(x, weight, wide)
    want = (x.double() @ weight.double().T).to(torch.bfloat16)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-2)


def test_other_dtypes_have_no_copy() -> None:
    assert reference.widen(torch.ones(2, 2)) is None


COMPILED = """
import torch
from glm_exl3.format.layout import Codebook
from glm_exl3.ops.matrix import PackedMatrix
from glm_exl3.quant.linear import LoadedLinear, Term

trellis = torch.randint(-(2**15), 2**15, (8, 16, 48), dtype=torch.int16)
packed = PackedMatrix(trellis, torch.ones(128).half(), torch.ones(256).half() / 9, Codebook.MUL1)
loaded = LoadedLinear((Term(packed, 200, 128), Term(torch.randn(8, 128), 8, 128)), "reference")
graphs = []

def record(graph, example):
    graphs.append(graph.code)
    return graph.forward

x = torch.randn(3, 128)
compiled = torch.compile(lambda y: loaded.apply(y, None), backend=record, fullgraph=True)
torch.testing.assert_close(compiled(x), loaded.apply(x, None))
assert graphs[0].count("exl3_linear") == 1, graphs
"""


@pytest.mark.slow
def test_a_compiled_graph_holds_the_operation_as_one_node() -> None:
    """vLLM compiles drafters; the CPU platform turns that off unless the variable is set."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "0"}
    subprocess.run([sys.executable, "-c", COMPILED], check=True, env=environment)
