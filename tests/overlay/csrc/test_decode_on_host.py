"""The decode kernels, compiled for the host, against the reference in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from glm_exl3 import envs
from glm_exl3.format.layout import Codebook
from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix
from glm_exl3.ref.linear import exl3_linear, exl3_parts_apart
from glm_exl3.ref.moe import exl3_moe
from kernels.inputs import Routed, random_matrix, random_routing, random_stack

RATES = [(3, Codebook.MUL1), (4, Codebook.MCG)]
PRODUCTS = {Codebook.MUL1: ("halves", "integers"), Codebook.MCG: ("halves",)}
CASES = [(*rate, product) for rate in RATES for product in PRODUCTS[rate[1]]]
CODES = {Codebook.MCG: 1, Codebook.MUL1: 2}
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
TOLERANCE = 1.5e-3
LIMIT = 10.0


class Kernels:
    """The compiled kernels of one rate, with a seed of their own."""

    def __init__(self, run: Callable[..., bytearray], bits: int, codebook: Codebook):
        self.run, self.bits, self.codebook = run, bits, codebook
        self.generator = torch.Generator().manual_seed(bits)

    def matrix(self, k: int, n: int) -> PackedMatrix:
        return random_matrix(k, n, 16 * self.bits, self.codebook, self.generator)

    def stacks(self, experts: int, hidden: int, intermediate: int, *, same_suh: bool = True):
        last_dim, generator = 16 * self.bits, self.generator
        return (
            random_stack(
                (experts, 2), hidden, intermediate, last_dim, self.codebook, generator,
                same_suh=same_suh,
            ),
            random_stack((experts,), intermediate, hidden, last_dim, self.codebook, generator),
        )  # fmt: skip

    def tokens(self, count: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(count, k, generator=self.generator).to(dtype)

    def routing(self, tokens: int, hidden: int, experts: int, top_k: int) -> Routed:
        return random_routing(tokens, hidden, experts, top_k, self.generator)

    def _outputs(self, what: str, x, width: int, tensors, dtype=torch.float32, **numbers):
        """`dtype` [T, width], whichever block and thread is first; the counters are zero again."""
        written, backwards = (
            self.run(
                what, tensors=[x, *tensors], tokens=len(x), x_type=TYPES[x.dtype],
                bits=self.bits, codebook=CODES[self.codebook],
                out_type=TYPES[dtype], backwards=order, **numbers,
            )
            for order in (0, 1)
        )  # fmt: skip
        assert written == backwards
        end = len(x) * width * dtype.itemsize
        assert not any(written[end:])
        return torch.frombuffer(written[:end], dtype=dtype).reshape(len(x), width)

    def linear(self, x, matrix, *, bias=None, split_k=0, **more) -> torch.Tensor:
        tensors = [*stored(matrix), *present(bias)]
        k, n = len(matrix.suh), len(matrix.svh)
        return self._outputs(
            "linear", x, n, tensors, k=k, n=n, split_k=split_k, bias=len(tensors) - 3, **more
        )

    def parts(self, x, matrices, *, dense=None, limit=None, **more) -> torch.Tensor:
        widths = [len(matrix.svh) for matrix in matrices]
        rows = 0 if dense is None else len(dense)
        return self._outputs(
            "parts", x, sum(widths) + rows if limit is None else widths[0],
            [*(tensor for matrix in matrices for tensor in stored(matrix)), *present(dense)],
            parts=len(matrices), **{f"n{i}": n for i, n in enumerate(widths)}, k=x.shape[1],
            dense_rows=rows, gated=int(limit is not None), limit=limit or 0.0, split_k=0, **more,
        )  # fmt: skip

    def moe(self, call: Routed, w13, w2, *, limit=LIMIT, expert_map=None, split_k=0, **more):
        same = torch.equal(w13.suh[:, 0], w13.suh[:, 1])
        routing = [call.ids, call.weights, *present(expert_map)]
        weights = [w13.trellis, w13.suh[:, :1] if same else w13.suh, w13.svh]
        hidden = call.x.shape[1]
        return self._outputs(
            "moe", call.x, hidden, [*routing, *weights, *stored(w2)],
            hidden=hidden, intermediate=w2.suh.shape[1], top_k=call.ids.shape[1],
            experts=len(w2.suh), mapped=0 if expert_map is None else len(expert_map),
            long_ids=int(call.ids.dtype is torch.int64), same_suh=int(same), split_k=split_k,
            limit=math.inf if limit is None else limit, **more,
        )  # fmt: skip


def stored(matrix: PackedMatrix | Exl3Stack) -> list[torch.Tensor]:
    return [matrix.trellis, matrix.suh, matrix.svh]


def present(tensor: torch.Tensor | None) -> list[torch.Tensor]:
    return [] if tensor is None else [tensor]


@pytest.fixture(scope="module")
def programs(compiled):
    made: dict[tuple[int, Codebook], Callable[..., bytearray]] = {}

    def program(bits: int, codebook: Codebook) -> Callable[..., bytearray]:
        if (bits, codebook) not in made:
            rate = f"k{bits}_{codebook.name.lower()}.cu"
            made[bits, codebook] = compiled(
                "decode", "decode.cu", f"decode_{rate}", "parts.cu", f"parts_{rate}"
            )
        return made[bits, codebook]

    return program


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}{case[1].name}{case[2]}")
def kernels(request, programs, monkeypatch) -> Kernels:
    bits, codebook, product = request.param
    monkeypatch.setenv(envs.INTEGER_PRODUCTS.name, "1" if product == "integers" else "0")
    return Kernels(programs(bits, codebook), bits, codebook)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest, relative to the largest output; NaN never passes a comparison."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def linear_in_double(x: torch.Tensor, m: PackedMatrix, bias=None) -> torch.Tensor:
    return exl3_linear(x.double(), m.trellis, m.suh, m.svh, m.codebook, bias)


def moe_in_double(call: Routed, w13, w2, limit=LIMIT, expert_map=None) -> torch.Tensor:
    return exl3_moe(call.x.double(), call.ids, call.weights, w13, w2, limit, expert_map)


def few(call: Routed, tokens: slice) -> Routed:
    return Routed(call.x[tokens], call.ids[tokens], call.weights[tokens])


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 20])
def test_linear(kernels, tokens):
    matrix, x = kernels.matrix(384, 128), kernels.tokens(tokens, 384)
    assert error(kernels.linear(x, matrix), linear_in_double(x, matrix)) < TOLERANCE


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("split", [1, 2])
def test_linear_splits_types_and_bias(kernels, split, dtype):
    matrix, bias = kernels.matrix(384, 256), kernels.matrix(128, 256).svh
    for tokens in (1, 4):
        x = kernels.tokens(tokens, 384, dtype)
        found = kernels.linear(x, matrix, bias=bias, split_k=split)
        assert error(found, linear_in_double(x, matrix, bias)) < TOLERANCE


def test_tokens_of_linear_do_not_feel_their_neighbours(kernels):
    matrix, x = kernels.matrix(384, 128), kernels.tokens(8, 384)
    together = kernels.linear(x, matrix)
    for first, last in ((0, 1), (3, 5), (2, 8)):
        assert torch.equal(kernels.linear(x[first:last], matrix), together[first:last])
    x[2, 77] = torch.nan
    found = kernels.linear(x, matrix)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(found[others], together[others])


@pytest.mark.parametrize("same_suh", [True, False])
@pytest.mark.parametrize(("tokens", "split"), [(1, 1), (1, 2), (3, 1), (3, 2), (9, 0)])
def test_moe(kernels, tokens, split, same_suh):
    """Fewer than four tokens times splits rotate within the blocks."""
    stacks = kernels.stacks(4, 256, 128, same_suh=same_suh)
    call = kernels.routing(tokens, 256, 4, 2)
    found = kernels.moe(call, *stacks, split_k=split)
    assert error(found, moe_in_double(call, *stacks)) < TOLERANCE


@pytest.mark.parametrize("tokens", [5, 8])
@pytest.mark.parametrize("split", [1, 2])
def test_many_rows_of_one_expert(kernels, tokens, split):
    stacks = kernels.stacks(3, 256, 256, same_suh=False)
    call = kernels.routing(tokens, 256, 3, 2)
    call.ids[:] = torch.tensor([2, 0])
    found = kernels.moe(call, *stacks, split_k=split)
    assert error(found, moe_in_double(call, *stacks)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 4])
def test_experts_of_other_ranks_add_nothing(kernels, tokens):
    stacks = kernels.stacks(2, 256, 128)
    expert_map = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    call = kernels.routing(tokens, 256, 4, 2)
    call.ids[0] = torch.tensor([1, 2])
    call.ids[1:2] = torch.tensor([2, 0])
    call = Routed(call.x, call.ids.long(), call.weights)
    found = kernels.moe(call, *stacks, limit=None, expert_map=expert_map)
    wanted = moe_in_double(call, *stacks, None, expert_map)
    assert error(found, wanted) < TOLERANCE
    assert not found[1:2].any()


@pytest.mark.parametrize("split", [1, 2])
def test_tokens_of_moe_do_not_feel_their_neighbours(kernels, split):
    stacks = kernels.stacks(4, 256, 128)
    call = kernels.routing(8, 256, 4, 2)
    together = kernels.moe(call, *stacks, split_k=split)
    for tokens in (slice(0, 1), slice(5, 8), slice(1, 7)):
        assert torch.equal(kernels.moe(few(call, tokens), *stacks, split_k=split), together[tokens])
    call.x[2, 77] = torch.nan
    found = kernels.moe(call, *stacks, split_k=split)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(found[others], together[others])


@pytest.mark.parametrize("tokens", [1, 3])
def test_parts_have_the_bits_of_each_alone(kernels, tokens):
    matrices, x = [kernels.matrix(384, n) for n in (128, 256)], kernels.tokens(tokens, 384)
    found = kernels.parts(x, matrices)
    assert torch.equal(found, torch.cat([kernels.linear(x, matrix) for matrix in matrices], dim=1))


@pytest.mark.parametrize("tokens", [1, 8])
def test_dense_rows_beside_a_packed_part(kernels, tokens):
    matrix, x = kernels.matrix(256, 128), kernels.tokens(tokens, 256)
    dense = kernels.tokens(12, 256) / 16
    found = kernels.parts(x, [matrix], dense=dense, dtype=torch.bfloat16)
    assert torch.equal(found[:, :128], kernels.linear(x, matrix, dtype=torch.bfloat16))
    assert error(found[:, 128:], x.double() @ dense.double().t()) < 2**-8


@pytest.mark.parametrize("limit", [math.inf, 0.5])
@pytest.mark.parametrize("tokens", [2, 3])
def test_gate_and_up_leave_as_their_activation(kernels, tokens, limit):
    matrices, x = [kernels.matrix(384, 128) for _ in range(2)], kernels.tokens(tokens, 384)
    found = kernels.parts(x, matrices, limit=limit)
    wanted = exl3_parts_apart([kernels.linear(x, matrix) for matrix in matrices], limit)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
