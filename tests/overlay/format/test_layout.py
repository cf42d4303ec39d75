"""Rates, markers and shapes: what is legal passes with its numbers, the rest is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3.format.errors import FormatError, GlmExl3Error
from glm_exl3.format.layout import (
    HALF_LAST_DIMS,
    INTEGER_LAST_DIMS,
    MCG_MARKER,
    MUL1_MARKER,
    Codebook,
    codebook_of,
    layout_of,
    step_ends,
)

BLOCKS = st.integers(1, 200)


@given(k=BLOCKS, n=BLOCKS, last_dim=st.sampled_from(INTEGER_LAST_DIMS + HALF_LAST_DIMS))
def test_legal_matrices_have_their_sizes(k: int, n: int, last_dim: int) -> None:
    layout = layout_of("m", (8 * k, 8 * n, last_dim), Codebook.MUL1, 128 * k, 128 * n)
    assert (layout.in_features, layout.out_features) == (128 * k, 128 * n)
    assert layout.trellis_shape == (8 * k, 8 * n, last_dim)
    weights = layout.in_features * layout.out_features
    assert layout.packed_bytes == weights * layout.bits / 8 + 2 * 128 * (k + n)


@given(last_dim=st.integers(0, 200), codebook=st.sampled_from(Codebook))
def test_other_rates_are_refused(last_dim: int, codebook: Codebook) -> None:
    legal = last_dim in INTEGER_LAST_DIMS or (
        last_dim in HALF_LAST_DIMS and codebook is Codebook.MUL1
    )
    if legal:
        assert layout_of("m", (8, 8, last_dim), codebook, 128, 128).bits == last_dim / 16
        return
    with pytest.raises(FormatError) as caught:
        layout_of("m", (8, 8, last_dim), codebook, 128, 128, file="f")
    assert (caught.value.file, caught.value.tensor) == ("f", "m.trellis")


@pytest.mark.parametrize("last_dim", INTEGER_LAST_DIMS + HALF_LAST_DIMS)
def test_steps_fill_the_ring(last_dim: int) -> None:
    ends = step_ends(last_dim)
    steps = {after - before for before, after in zip((0, *ends), ends, strict=False)}
    assert ends[-1] == 16 * last_dim
    assert steps == {last_dim // 16, -(-last_dim // 16)}


@pytest.mark.parametrize("signed", [True, False])
def test_markers_name_their_codebook(signed: bool) -> None:
    shift = 1 << 32 if signed else 0
    assert codebook_of("m", None, None) is Codebook.INST3
    assert codebook_of("m", MCG_MARKER - shift, None) is Codebook.MCG
    assert codebook_of("m", None, MUL1_MARKER - shift) is Codebook.MUL1


@given(st.integers(0, (1 << 32) - 1).filter(lambda value: value != MCG_MARKER))
def test_any_other_marker_value_is_refused(value: int) -> None:
    with pytest.raises(FormatError, match=f"{value:#010x}"):
        codebook_of("m", value, None)


def test_errors_say_seen_why_and_fix() -> None:
    error = GlmExl3Error(code="c", seen="one", why="two.", fix="three")
    assert str(error) == "one. two. three."
    located = FormatError(code="c", seen="one", why="two", fix="three", file="f", tensor="t")
    assert str(located) == "f: t: one. two. three."
