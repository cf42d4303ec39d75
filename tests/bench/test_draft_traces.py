"""Walks over traces: they write the whole text, and the adaptive length pays where it should."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from e2e import hybrid  # noqa: E402
from e2e import traces as tr  # noqa: E402
from glm_exl3 import envs  # noqa: E402

CURVE = envs.STEP_MS.default
LENGTHS = (2, 4, 7)


def trace(chance: float, seed: int, tokens: int = 400, prompt: int = 5) -> tr.Trace:
    """A text without repetition, whose drafts are right with `chance`, each on its own."""
    dice = random.Random(seed)
    drafts = {
        place: [place + i if dice.random() < chance else -1 for i in range(min(7, tokens - place))]
        for place in range(prompt + 1, tokens)
    }
    return tr.Trace(list(range(tokens)), prompt, drafts)


@given(st.floats(0, 1), st.integers(0, 99), st.sampled_from((1, 2, 4, 7)))
def test_a_walk_writes_every_token_once(chance: float, seed: int, length: int) -> None:
    made = trace(chance, seed, tokens=60)
    steps = list(tr.walk(made, tr.drafter, tr.fixed(length)))
    written = sum(step.accepted + 1 for step in steps)
    assert 60 - 6 <= written <= 60 - 6 + 1
    assert all(0 <= step.accepted <= step.drafted <= length for step in steps)


def test_a_lookup_follows_a_repetition_and_leaves_other_text_to_the_drafter() -> None:
    words = [*range(40)] * 8
    made = tr.Trace(words, 41, {place: [-1] * 7 for place in range(len(words))})
    assert tr.accepted_per_step([made], tr.drafter, 7) == 0
    assert tr.accepted_per_step([made], tr.hybrid(6), 7) > 5
    assert tr.accepted_per_step([made], tr.hybrid(6), 15) > 11
    fresh = trace(0.6, 3)
    alone = tr.accepted_per_step([fresh], tr.drafter, 7)
    assert tr.accepted_per_step([fresh], tr.hybrid(6), 7) == alone


def gain(chances: list[float]) -> float:
    texts = [trace(chance, seed) for seed, chance in enumerate(chances)]
    fixed = tr.tokens_per_ms(texts, tr.drafter, CURVE, LENGTHS, adapt=False)
    return tr.tokens_per_ms(texts, tr.drafter, CURVE, LENGTHS, adapt=True) / fixed - 1


@pytest.mark.parametrize("chance", [0.1, 0.3, 0.5])
def test_little_that_survives_gains_ten_percent(chance: float) -> None:
    assert gain([chance] * 3) >= 0.10


@pytest.mark.parametrize("chance", [0.95, 1.0])
def test_much_that_survives_loses_at_most_one_percent(chance: float) -> None:
    assert gain([chance] * 3) >= -0.01


def test_texts_that_change_gain_too() -> None:
    assert gain([0.2, 0.97, 0.2, 0.97]) >= 0.05


@pytest.mark.parametrize(
    ("edits", "prose", "counted", "good"),
    [
        (1.3, 1.0, 2.0, True),
        (1.2, 1.0, 2.0, False),
        (1.3, 0.97, 2.0, False),
        (1.3, 1.0, 1.1, False),
    ],
)
def test_the_verdict_is_that_of_the_worst_kind(
    edits: float, prose: float, counted: float, good: bool
) -> None:
    least = f"lookup from {hybrid.model_least()}"
    rows = [
        {"kind": kind, "dflash2": 2.0, least: 2 * gain}
        for kind, gain in (("code edit", edits), ("JSON edit", 3.0), ("prose, T = 1", prose))
    ]
    alone, both = ({"accepted_per_step": value} for value in (1.0, counted))
    engine = [{"kind": "code edit", "dflash2": alone, "hybrid": both}]
    found, line = hybrid.verdict({"hybrid": rows, "engine": engine})
    assert found is good and ("ok" in line) is good
