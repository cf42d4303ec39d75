"""The two-sample test: honest about equal distributions, and it catches a planted bias."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e import two_sample
from e2e.two_sample import classes, compare, holm, p_value, statistics

VOCABULARY, CONTEXTS = 40, 20


@pytest.fixture(autouse=True)
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough permutations for a corrected p of 0.005."""
    monkeypatch.setattr(two_sample, "PERMUTATIONS", 5000)


def distributions(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(VOCABULARY, 0.2), CONTEXTS)


def drawn(shares: np.ndarray, count: int, seed: int) -> list[list[list[int]]]:
    generator = np.random.default_rng(seed)
    return [generator.choice(len(row), (count, 1), p=row).tolist() for row in shares]


def biased(shares: np.ndarray, amount: float) -> np.ndarray:
    """Part of the most probable token's share given to the second."""
    moved = shares.copy()
    for row in moved:
        first, second = np.argsort(row)[-1:-3:-1]
        step = amount * row[first]
        row[first] -= step
        row[second] += step
    return moved


def test_equal_distributions_pass() -> None:
    outcomes = []
    for seed in range(6):
        shares = distributions(seed)
        outcomes.append(compare(drawn(shares, 1000, 2 * seed), drawn(shares, 1000, 2 * seed + 1),
                                [0], seed))  # fmt: skip
    assert all(one.equal for one in outcomes)
    assert outcomes[0].draws == 20_000 and outcomes[0].tests == CONTEXTS + 1
    assert min(one.corrected_p for one in outcomes) < 0.9


@pytest.mark.parametrize("amount", [0.2, 0.3])
def test_a_planted_bias_is_caught(amount: float) -> None:
    for seed in range(4):
        shares = distributions(seed)
        other = drawn(biased(shares, amount), 1000, 99 + seed)
        assert not compare(drawn(shares, 1000, seed), other, [0], seed).equal


def test_a_bias_in_one_context_alone_is_named() -> None:
    shares = distributions(3)
    moved = shares.copy()
    moved[7] = biased(shares[7:8], 0.5)[0]
    found = compare(drawn(shares, 1000, 1), drawn(moved, 1000, 2), [0])
    assert not found.equal and found.worst == (7, 0)


def test_p_values_are_uniform_when_nothing_differs() -> None:
    generator = np.random.default_rng(0)
    share = np.random.default_rng(5).dirichlet(np.full(12, 1.0))
    values = []
    for _ in range(150):
        pair = generator.multinomial(400, share, size=2)
        values.append(p_value(*statistics(*[dict(enumerate(one)) for one in pair], generator)))
    assert abs(np.mean(values) - 0.5) < 0.1
    assert np.mean(np.array(values) < 0.1) < 0.2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_holm_only_raises_and_keeps_the_order(values: list[float]) -> None:
    corrected = holm(values)
    assert all(before <= after <= 1 for before, after in zip(values, corrected, strict=True))
    order = sorted(range(len(values)), key=values.__getitem__)
    assert [corrected[i] for i in order] == sorted(corrected)
    assert corrected[order[0]] == min(1.0, values[order[0]] * len(values))


def test_rare_tokens_are_one_class() -> None:
    table = classes({1: 50, 2: 3, 3: 2}, {1: 40, 2: 1, 4: 4})
    assert table.tolist() == [[50, 5], [40, 5]]
    assert p_value(*statistics({1: 5}, {1: 9}, np.random.default_rng(0))) == 1.0


def test_other_contexts_are_refused() -> None:
    with pytest.raises(ValueError, match="contexts"):
        compare([[[1]]], [[[1]], [[2]]], [0])
