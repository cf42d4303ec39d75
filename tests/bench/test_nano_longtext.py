from __future__ import annotations

import math
import random

import pytest

from nano.longtext import (
    WINDOW,
    Limits,
    entropy,
    limits,
    more_by_chance,
    repeated_share,
    verdict,
    windows,
)

BOUNDS = Limits(repeated=0.3, entropy=4.0)


def varied(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1900) for _ in range(count)]


def test_a_loop_is_repetition_wherever_it_starts() -> None:
    assert repeated_share(varied(WINDOW), 0) == 0
    phrase = varied(40)
    assert repeated_share(varied(512, 1) + phrase * 20, 640) > 0.9
    assert repeated_share(phrase + varied(600, 2) + phrase + varied(300, 3), 640) == 0


def test_entropy_counts_nats() -> None:
    assert entropy([1] * 10) == 0
    assert entropy([1, 2, 3, 4]) == pytest.approx(math.log(4))


def test_limits_are_what_one_window_in_a_hundred_passes() -> None:
    measured = [(n / 2000, 5 + n / 2000) for n in range(2000)]
    found = limits(measured)
    assert found.repeated == pytest.approx(1979 / 2000)
    assert found.entropy == pytest.approx(5 + 20 / 2000)


@pytest.mark.parametrize(
    ("tokens", "text", "degenerate"),
    [
        (varied(2000), "fine", False),
        (varied(400) + varied(30) * 60, "loops", True),
        ([7, 8] * 1000, "poor", True),
        (varied(2000), "gar\ufffdbage", True),
        (varied(2000), "cut at the end\ufffd", False),
        (varied(1800) + [7] * 200, "ends badly", False),
    ],
)
def test_a_text_is_judged_by_its_windows(tokens: list[int], text: str, degenerate: bool) -> None:
    assert verdict(tokens, text, BOUNDS).degenerate is degenerate


def test_windows_cover_the_text() -> None:
    assert len(windows(varied(2000))) == (2000 - WINDOW) // 128 + 1


def test_more_degenerate_texts_have_small_odds_by_chance() -> None:
    assert more_by_chance(0, 0, 48) == 1
    assert more_by_chance(10, 10, 48) > 0.5
    assert more_by_chance(10, 11, 48) > 0.3
    assert more_by_chance(2, 20, 48) < 1e-4
    assert more_by_chance(0, 1, 2) == pytest.approx(0.5)
