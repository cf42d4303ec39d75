"""Compare greedy text of two engine configurations, token by token.

A run is a list of `Line`s: the tokens of one prompt and, per token, the margin in nats between the
best and the second-best candidate. Two configurations are equal when their tokens are equal; at a
first difference that the reference itself holds for a near-tie, the reference token is forced and
the comparison goes on behind it. The rule is the one of docs/architecture.md, "Equal answers".
Logits are BF16, whose neighbours lie 1/16 apart between 8 and 16: where both candidates round to a
neighbour, they move by two steps, which is a tie of the number format.

Sums in another order can also tip a router to another expert, which moves single positions far.
Where the order differs (`wide_share`), that share of positions may flip against a clear margin, as
it does between transformers' bf16 and fp32; elsewhere none may.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

NEAR_TIE_NATS = 0.05
BF16_LOGIT_STEPS = 2 * 2**-4 + 1e-3
MAX_TIE_SHARE = 0.05
MAX_WIDE_SHARE = 0.005


@dataclass(frozen=True)
class Line:
    """One continuation: `tokens`, the log-probability of each and its margin to the runner-up."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]


@dataclass
class Comparison:
    """What a comparison saw.

    `wide` lists flips against a clear margin, `broken` what makes the texts different.
    """

    positions: int = 0
    ties: int = 0
    wide: list[str] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def median_difference(self) -> float:
        return statistics.median(self.differences) if self.differences else 0.0

    def as_json(self) -> dict[str, object]:
        record = asdict(self)
        del record["differences"]
        return record | {"median_difference": self.median_difference}


Generate = Callable[[Sequence[Sequence[int]], Sequence[int]], list[Line]]


def compare(
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Line],
    generate: Generate,
    wide_share: float = 0.0,
) -> Comparison:
    """Generate with `generate` what `reference` holds and compare; see the module docstring.

    `generate(prompts, max_tokens)` returns one `Line` per prompt, greedy, end-of-text ignored. Of
    all positions, `wide_share` may flip against a clear margin, and one if that is less than one.
    """
    result = Comparison()
    total = sum(len(line.tokens) for line in reference)
    allowed_wide = max(1, int(wide_share * total)) if wide_share else 0
    pending = dict.fromkeys(range(len(prompts)), 0)
    while pending:
        order = list(pending)
        extended = [[*prompts[i], *reference[i].tokens[: pending[i]]] for i in order]
        lines = generate(extended, [len(reference[i].tokens) - pending[i] for i in order])
        for index, line in zip(order, lines, strict=True):
            start = pending.pop(index)
            resume = _match(index, start, reference[index], line, result)
            if len(result.wide) > allowed_wide:
                result.broken += result.wide
                return result
            if resume is not None and resume < len(reference[index].tokens):
                pending[index] = resume
    if result.ties > max(1, MAX_TIE_SHARE * result.positions):
        result.broken.append(f"{result.ties} near-ties flipped in {result.positions} positions")
    return result


def _match(index: int, start: int, reference: Line, line: Line, result: Comparison) -> int | None:
    """Compare one line from `start`; the position to go on from after a tie, or None at its end."""
    for offset, token in enumerate(line.tokens):
        position = start + offset
        result.positions += 1
        if token == reference.tokens[position]:
            result.differences.append(abs(line.logprobs[offset] - reference.logprobs[position]))
            continue
        margin = reference.margins[position]
        allowed = max(NEAR_TIE_NATS, BF16_LOGIT_STEPS, 4 * result.median_difference)
        if margin > allowed:
            result.wide.append(
                f"prompt {index}, position {position}: {token} instead of "
                f"{reference.tokens[position]}, reference margin {margin:.3f} nat > {allowed:.3f}"
            )
        else:
            result.ties += 1
        return position + 1
    if len(line.tokens) != len(reference.tokens) - start:
        result.broken.append(
            f"prompt {index}: {len(line.tokens)} tokens instead of {len(reference.tokens) - start}"
        )
    return None
