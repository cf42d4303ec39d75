"""A direction taken out of weights and of residual streams."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from glm_exl3.ref import projection

SEEDS = st.integers(0, 2**31)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(SEEDS, st.sampled_from([256, 1024, 4096]))
def test_alpha_one_leaves_no_component_in_bf16(seed: int, hidden: int) -> None:
    """At most 1e-3 of the component is left, and rows move by two units at most beyond exact."""
    matrix = normal(seed, hidden, 96).bfloat16()
    direction = projection.unit(normal(seed + 1, hidden))
    edited = projection.weight(matrix, direction, 1.0)
    before, after = (float((direction @ m.float()).norm()) for m in (matrix, edited))
    assert edited.dtype == torch.bfloat16
    assert after <= 1e-3 * before
    exact = matrix.float() - torch.outer(direction, direction @ matrix.float())
    assert bool(((edited.float() - exact).abs() <= 2**-6 * exact.abs() + 1e-6).all())


@given(SEEDS, st.floats(-4, 4), st.sampled_from([1, 2, 4]))
def test_columns_of_ranks_make_the_whole(seed: int, alpha: float, ranks: int) -> None:
    """No collective is needed, and the parts are those of one rank to a rounding of fp32."""
    matrix, direction = normal(seed, 64, 96).bfloat16(), projection.unit(normal(seed + 1, 64))
    whole = projection.weight(matrix, direction, alpha)
    parts = [projection.weight(part, direction, alpha) for part in matrix.chunk(ranks, 1)]
    torch.testing.assert_close(torch.cat(parts, 1).float(), whole.float(), rtol=2**-6, atol=1e-5)


@given(SEEDS, st.floats(-3, 3))
def test_weights_are_the_formula(seed: int, alpha: float) -> None:
    matrix, direction = normal(seed, 32, 8).double(), projection.unit(normal(seed + 1, 32)).double()
    formula = (torch.eye(32).double() - alpha * torch.outer(direction, direction)) @ matrix
    found = projection.weight(matrix.float(), direction.float(), alpha)
    torch.testing.assert_close(found.double(), formula, rtol=1e-4, atol=1e-5)


@given(SEEDS, st.floats(-3, 3), st.integers(1, 5))
def test_streams_are_one_vector_per_token(seed: int, alpha: float, tokens: int) -> None:
    residual, direction = normal(seed, tokens, 4, 16), projection.unit(normal(seed + 1, 64))
    found = projection.streams(residual, direction, direction * alpha)
    flat = residual.flatten(1)
    formula = flat - alpha * (flat @ direction)[:, None] * direction
    torch.testing.assert_close(found, formula.view_as(residual), rtol=1e-4, atol=1e-5)


def test_streams_read_nothing_back() -> None:
    """On tensors without values: anything that a graph could not capture would raise."""
    with FakeTensorMode():
        residual, direction = torch.empty(3, 4, 16, dtype=torch.bfloat16), torch.empty(64)
        found = projection.streams(residual, direction, direction)
    assert (found.shape, found.dtype) == (residual.shape, torch.bfloat16)


def test_a_direction_of_one_row_takes_that_row_out() -> None:
    matrix = normal(0, 8, 4).bfloat16()
    edited = projection.weight(matrix, torch.eye(8)[2], 1.0)
    matrix[2] = 0
    assert torch.equal(edited, matrix)


@pytest.mark.parametrize("value", [torch.zeros(4), torch.tensor([1.0, float("nan")])])
def test_a_direction_without_length_is_refused(value: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="no length"):
        projection.unit(value)
