"""How many drafts are worth verifying: an estimate of what survives, and the best length for it.

What: for every draft position the chance that its token is accepted once all before it were, as an
exponential moving average over what was verified lately. A step of k drafts gives 1 token and each
draft whose predecessors all survive; it takes the time that the curve says for all tokens of the
batch. The length with the most tokens a millisecond is chosen.

Why conditional chances: a short length says nothing about later positions, which keep their value
until the whole of a draft survives; then they follow the last position seen, so that the length can
grow again. Pure and without a clock: the same verdicts give the same lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Curve = Sequence[tuple[int, float]]
FIRST_GUESS = 0.9
RATE = 0.08
MARGIN = 0.04


def step_ms(curve: Curve, tokens: int) -> float:
    """Milliseconds of a step of `tokens`: linear between the points, constant before the first."""
    if tokens <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in zip(curve, curve[1:], strict=False):
        if tokens <= right:
            return low + (high - low) * (tokens - left) / (right - left)
    (left, low), (right, high) = curve[-2:]
    return high + max(0.0, high - low) * (tokens - right) / (right - left)


@dataclass
class Chooser:
    """`lengths` ascending, `curve` ascending by tokens, `rate` the weight of one verdict."""

    lengths: tuple[int, ...]
    curve: Curve
    rate: float = RATE
    chances: list[float] = field(default_factory=list)
    last: int = 0

    def __post_init__(self) -> None:
        self.chances = self.chances or [FIRST_GUESS] * self.lengths[-1]
        self.last = self.last if self.last in self.lengths else self.lengths[-1]

    def observe(self, drafted: int, accepted: int) -> None:
        """One request's verdict: the first `accepted` of `drafted` tokens survived."""
        drafted = min(drafted, len(self.chances))
        if drafted < 1 or accepted < 0:
            return
        for place in range(min(accepted, drafted)):
            self.chances[place] += self.rate * (1 - self.chances[place])
        if accepted < drafted:
            self.chances[accepted] -= self.rate * self.chances[accepted]
            return
        last = self.chances[drafted - 1]
        for place in range(drafted, len(self.chances)):
            self.chances[place] += self.rate * (last - self.chances[place])

    def expected(self, length: int) -> float:
        """Tokens that a step of `length` drafts gives a request."""
        total = alive = 1.0
        for chance in self.chances[:length]:
            alive *= chance
            total += alive
        return total

    def choose(self, requests: int) -> int:
        """The length for a step of `requests` decoding requests."""
        count = max(1, requests)
        rates = {k: self.expected(k) / step_ms(self.curve, count * (1 + k)) for k in self.lengths}
        best = max(self.lengths, key=lambda k: (rates[k], k))
        if rates[best] > rates[self.last] * (1 + MARGIN):
            self.last = best
        return self.last


def checked_lengths(values: Iterable[int], captured: Sequence[int]) -> tuple[int, ...]:
    """`values` ascending, without repetition. Raises ValueError for one that is not captured."""
    lengths = tuple(sorted({int(value) for value in values}))
    unknown = [k for k in lengths if k not in captured]
    if not lengths or unknown:
        raise ValueError(f"lengths {list(values)}: choose one or more of {list(captured)}")
    return lengths
