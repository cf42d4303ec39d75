"""Whether two sets of draws come from one distribution: per context and position, then corrected.

Draws of a token are compared as counts. Tokens that both samples together drew fewer than `RARE`
times form one class. The statistic is the two-sample chi-square; its p-value comes from drawing
both samples anew from their union (the permutation distribution), so that no approximation has to
hold. One more test per position adds up the statistics of all contexts, for a bias that is small
in each. Holm's correction keeps the chance that any of the tests errs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RARE = 10
PERMUTATIONS = 20_000
LEVEL = 0.01
Draws = Sequence[Sequence[Sequence[int]]]
"""By context, then by draw: the tokens of one continuation."""


@dataclass(frozen=True)
class Outcome:
    """The comparison of two sets of draws."""

    contexts: int
    draws: int
    tests: int
    smallest_p: float
    corrected_p: float
    worst: tuple[int | None, int]
    """Context (None: all together) and position of the smallest p-value."""

    @property
    def equal(self) -> bool:
        """Whether nothing speaks against one distribution, at the level of 1 %."""
        return self.corrected_p > LEVEL

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "worst": list(self.worst), "equal": self.equal}


def classes(first: Mapping[int, int], second: Mapping[int, int]) -> np.ndarray:
    """Counts [2, classes]: frequent tokens each, all rare ones together."""
    tokens = sorted({*first, *second})
    table = np.array([[one.get(token, 0) for token in tokens] for one in (first, second)])
    rare = table.sum(0) < RARE
    kept = table[:, ~rare]
    return np.column_stack([kept, table[:, rare].sum(1)]) if rare.any() else kept


def statistic(first: np.ndarray, total: np.ndarray, size: int) -> np.ndarray:
    """Chi-square of samples [..., classes] of `size` draws against their union `total`."""
    everything = total.sum()
    share = size / everything
    expected = total * share
    deviation = (first - expected) ** 2
    return (deviation / expected).sum(-1) / (1 - share)


def statistics(
    first: Mapping[int, int], second: Mapping[int, int], generator: np.random.Generator
) -> tuple[float, np.ndarray]:
    """The statistic of two counts, and those of `PERMUTATIONS` samples drawn from their union."""
    table = classes(first, second)
    total, size = table.sum(0), int(table[0].sum())
    if table.shape[1] < 2 or not 0 < size < total.sum():
        return 0.0, np.zeros(PERMUTATIONS)
    seen = statistic(table[0], total, size)
    drawn = generator.multivariate_hypergeometric(
        total, size, size=PERMUTATIONS, method="marginals"
    )
    return float(seen), statistic(drawn, total, size)


def p_value(seen: float, drawn: np.ndarray) -> float:
    """Chance of a statistic as large as `seen`, or larger, if both samples have one
    distribution."""
    return (int((drawn >= seen - 1e-9).sum()) + 1) / (len(drawn) + 1)


def holm(values: Sequence[float]) -> list[float]:
    """The values corrected for their number, in their order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    corrected, running = [1.0] * len(values), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, values[index] * (len(values) - rank)))
        corrected[index] = running
    return corrected


def compare(first: Draws, second: Draws, positions: Sequence[int], seed: int = 0) -> Outcome:
    """Compare the tokens at `positions` of the continuations, context by context.

    Raises ValueError when the two were not drawn from the same number of contexts.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} contexts")
    generator = np.random.default_rng(seed)
    where: list[tuple[int | None, int]] = []
    values = []
    for position in positions:
        together, drawn_together = 0.0, np.zeros(PERMUTATIONS)
        for context, (ours, theirs) in enumerate(zip(first, second, strict=True)):
            counts = [Counter(draw[position] for draw in one) for one in (ours, theirs)]
            seen, drawn = statistics(*counts, generator)
            together, drawn_together = together + seen, drawn_together + drawn
            where.append((context, position))
            values.append(p_value(seen, drawn))
        where.append((None, position))
        values.append(p_value(together, drawn_together))
    corrected = holm(values)
    least = min(range(len(values)), key=values.__getitem__)
    return Outcome(
        contexts=len(first),
        draws=sum(len(draws) for draws in first) * len(positions),
        tests=len(values),
        smallest_p=values[least],
        corrected_p=corrected[least],
        worst=where[least],
    )
