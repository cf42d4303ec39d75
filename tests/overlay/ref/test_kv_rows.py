"""The reference reader and writer of latent rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_exl3.format.kv import BF16, FP8, INT8, LAYOUTS, RowLayout
from glm_exl3.ref.kv_rows import read_rows, write_rows

LAYOUT = st.sampled_from(list(LAYOUTS.values()))
LARGEST_STEP = {BF16: 0.0, FP8: 1 / 16, INT8: 0.51 / 127}


@given(LAYOUT, st.integers(0, 1 << 30), st.integers(1, 5), st.floats(-20, 20))
@settings(deadline=None, max_examples=40)
def test_a_row_reads_as_what_was_written(
    layout: RowLayout, seed: int, rows: int, exponent: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    latents = (torch.randn(rows, 512, generator=random) * 2.0**exponent).bfloat16()
    stored = write_rows(latents, layout)
    assert (stored.dtype, stored.shape) == (torch.uint8, (rows, layout.row_bytes))
    read = read_rows(stored, layout)
    groups = latents.float().view(rows, 4, 128)
    limit = groups.abs().amax(-1, keepdim=True) * LARGEST_STEP[layout]
    assert bool(((read.view_as(groups) - groups).abs() <= limit + 1e-30).all())


@pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_zeros_stay_zeros_and_the_largest_number_is_exact(layout: RowLayout) -> None:
    latents = torch.zeros(1, 512)
    latents[0, 130] = -3.5
    read = read_rows(write_rows(latents, layout), layout)
    assert torch.equal(read[0, :128], torch.zeros(128))
    assert read[0, 130].item() == pytest.approx(-3.5, rel=1e-6)


@given(LAYOUT, st.integers(0, 1 << 30))
@settings(deadline=None, max_examples=20)
def test_writing_what_was_read_gives_the_same_row(layout: RowLayout, seed: int) -> None:
    """A row may be moved to another cache through its numbers, up to one rounding to bf16."""
    random = torch.Generator().manual_seed(seed)
    once = read_rows(write_rows(torch.randn(2, 512, generator=random), layout), layout)
    twice = read_rows(write_rows(once, layout), layout)
    assert torch.allclose(once, twice, rtol=0.01 if layout is INT8 else 0.07, atol=0.02)


def test_fp8_rows_are_the_bytes_of_torch() -> None:
    latents = torch.randn(3, 512).bfloat16().float()
    stored = write_rows(latents, FP8)
    scales = stored[:, 512:].contiguous().view(torch.float32)
    numbers = (latents.view(3, 4, 128) / scales[..., None]).to(torch.float8_e4m3fn)
    assert torch.equal(stored[:, :512], numbers.view(torch.uint8).view(3, 512))
