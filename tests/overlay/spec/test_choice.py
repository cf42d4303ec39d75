"""The choice of a draft length: step times, chances, and what a trace of verdicts leads to."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3.spec.choice import Chooser, checked_lengths, step_ms

CURVE = ((1, 9.9), (3, 15.4), (5, 19.2), (8, 24.4), (16, 36.2))
LENGTHS = (2, 4, 7)


def chooser(**changes: object) -> Chooser:
    return Chooser(**{"lengths": LENGTHS, "curve": CURVE, **changes})


@pytest.mark.parametrize(("tokens", "ms"), [(1, 9.9), (3, 15.4), (4, 17.3), (16, 36.2), (24, 48.0)])
def test_step_times_lie_on_the_curve(tokens: int, ms: float) -> None:
    assert step_ms(CURVE, tokens) == pytest.approx(ms)


def test_what_survives_leads_to_long_drafts_and_what_does_not_to_short_ones() -> None:
    one = chooser()
    for _ in range(60):
        one.observe(7, 7)
    assert one.choose(1) == 7
    for _ in range(60):
        one.observe(one.choose(1), 0)
    assert one.choose(1) == 2


def test_a_short_length_grows_again_when_all_of_it_survives() -> None:
    one = chooser(chances=[0.05] * 7)
    assert one.choose(1) == 2
    for _ in range(120):
        length = one.choose(1)
        one.observe(length, length)
    assert one.choose(1) == 7


def test_chances_follow_the_share_that_survives() -> None:
    generator, one = random.Random(1), chooser(rate=0.01)
    for _ in range(4000):
        survived = next((i for i in range(7) if generator.random() > 0.7), 7)
        one.observe(7, survived)
    assert one.chances[0] == pytest.approx(0.7, abs=0.12)
    assert one.expected(1) == pytest.approx(1.7, abs=0.12)


def test_more_requests_make_drafts_dearer() -> None:
    flat_then_steep = ((1, 10.0), (8, 11.0), (64, 90.0))
    one = chooser(curve=flat_then_steep, chances=[0.6] * 7)
    assert one.choose(1) > one.choose(8)


@given(
    st.lists(st.tuples(st.integers(-1, 9), st.integers(-1, 9)), max_size=60),
    st.integers(0, 2000),
    st.floats(0.001, 1.0),
)
def test_any_verdicts_leave_chances_in_range_and_a_length_of_the_set(
    verdicts: list[tuple[int, int]], requests: int, rate: float
) -> None:
    one = chooser(rate=rate)
    for drafted, accepted in verdicts:
        one.observe(drafted, min(accepted, drafted))
    assert all(0.0 <= chance <= 1.0 for chance in one.chances)
    assert one.choose(requests) in LENGTHS


@pytest.mark.parametrize("bad", [(), (3,), (2, 8)])
def test_lengths_that_were_not_captured_are_refused(bad: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="choose one or more of"):
        checked_lengths(bad, LENGTHS)


def test_lengths_come_out_ascending_and_once() -> None:
    assert checked_lengths([7, 2, 7], LENGTHS) == (2, 7)
