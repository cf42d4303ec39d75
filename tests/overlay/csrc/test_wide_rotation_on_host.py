"""A row rotated by lanes of sixteen numbers has the bits of one rotated by lanes of four."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from glm_exl3.ref.hadamard import had128

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
LENGTHS = [128, 384, 4096, 4224, 8192]
"""A part of a warp, no whole number of warps, all lanes once, one block more, all lanes twice."""


@pytest.fixture(scope="module")
def rotate(compiled: Callable[..., Callable[..., bytearray]]) -> Callable[..., torch.Tensor]:
    """fp32 [2, k + 1]: the row and the bits of its bound, by lanes of four and of sixteen."""
    program = compiled("wide")

    def run(x: torch.Tensor, suh: torch.Tensor) -> torch.Tensor:
        written = program(tensors=[x, suh], k=len(x), x_type=TYPES[x.dtype])
        return torch.frombuffer(written, dtype=torch.float32).reshape(2, len(x) + 1)

    return run


def row(k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    return (
        (torch.randn(k, generator=generator) * 3).to(dtype),
        torch.randn(k, generator=generator).half(),
    )


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_bits_are_the_same(
    rotate: Callable[..., torch.Tensor], k: int, dtype: torch.dtype
) -> None:
    x, suh = row(k, dtype)
    narrow, wide = rotate(x, suh).view(torch.int32)
    assert torch.equal(narrow, wide)
    wanted = had128(x.double() * suh.double())
    found = wide[:k].view(torch.float32).double()
    scale = found.abs().max() / wanted.abs().max()
    torch.testing.assert_close(found / scale, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_marks_the_row(rotate: Callable[..., torch.Tensor], value: float) -> None:
    x, suh = row(4224, torch.float32)
    x[4200] = value
    narrow, wide = rotate(x, suh)
    torch.testing.assert_close(wide, narrow, rtol=0, atol=0, equal_nan=True)
    assert not bool(wide[4096:4224].isfinite().any())
