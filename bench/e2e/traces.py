"""What a drafter proposes at every position of texts that the engine wrote, and walks over that.

A trace holds, for each position of an answer, the tokens the drafter would have proposed there. The
engine writes it by advancing one token per step: drafts are recorded and replaced by a token that
never occurs. How a text is written does not depend on drafts, so any way of drafting can be walked
over the trace afterwards, step by step, and gives what the engine would have accepted. For sampled
answers that holds, too: a draft that is a point mass is accepted as often as the sample equals it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from glm_exl3.ref import lookup
from glm_exl3.spec.choice import Chooser, Curve, step_ms


@dataclass(frozen=True)
class Trace:
    """`tokens` of prompt and answer, of which `prompt` are given; `drafts` by position."""

    tokens: list[int]
    prompt: int
    drafts: dict[int, list[int]]


@dataclass(frozen=True)
class Step:
    """One verify step: how many drafts, how many of them survived."""

    drafted: int
    accepted: int


Propose = Callable[[Trace, int, int], list[int]]


def survivors(trace: Trace, place: int, drafts: Sequence[int]) -> int:
    """How many of `drafts` are the text from `place` on."""
    for count, (draft, token) in enumerate(zip(drafts, trace.tokens[place:], strict=False)):
        if draft != token:
            return count
    return min(len(drafts), len(trace.tokens) - place)


def drafter(trace: Trace, place: int, steps: int) -> list[int]:
    """The drafter's own proposal."""
    return trace.drafts[place][:steps]


def hybrid(least: int) -> Propose:
    """A lookup where `least` tokens match, else the drafter's, its last token repeated."""

    def propose(trace: Trace, place: int, steps: int) -> list[int]:
        text = torch.tensor(trace.tokens[:place])
        found = lookup.find(text)
        if found.match >= least:
            return [int(t) for t in lookup.continuation(text, found.start, steps)]
        own = trace.drafts[place][:steps]
        return own + own[-1:] * (steps - len(own))

    return propose


def walk(trace: Trace, propose: Propose, lengths: Iterator[int]) -> Iterator[Step]:
    """The steps that write the answer: one token, the drafts that survive, and so on."""
    place, end = trace.prompt + 1, len(trace.tokens)
    while place < end:
        drafted = min(next(lengths), end - place)
        accepted = survivors(trace, place, propose(trace, place, drafted))
        yield Step(drafted, accepted)
        place += accepted + 1


def fixed(length: int) -> Iterator[int]:
    while True:
        yield length


class Adapting:
    """Lengths of `chooser`; a verdict counts two steps later, as scheduling runs ahead."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser
        self.pending: list[Step] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return self.chooser.choose(1)

    def saw(self, step: Step) -> None:
        self.pending.append(step)
        if len(self.pending) > 1:
            old = self.pending.pop(0)
            self.chooser.observe(old.drafted, old.accepted)


def accepted_per_step(traces: Sequence[Trace], propose: Propose, length: int) -> float:
    """Mean of accepted drafts over all steps of all traces."""
    steps = [step for trace in traces for step in walk(trace, propose, fixed(length))]
    return sum(step.accepted for step in steps) / len(steps)


def tokens_per_ms(
    traces: Sequence[Trace], propose: Propose, curve: Curve, lengths: Sequence[int], *, adapt: bool
) -> float:
    """Tokens a millisecond of one request after the other, by the curve of step times.

    The largest of `lengths` in every step or, with `adapt`, what the chooser picks of them.
    """
    adapting = Adapting(Chooser(tuple(lengths), curve))
    tokens, spent = 0, 0.0
    for trace in traces:
        for step in walk(trace, propose, adapting if adapt else fixed(max(lengths))):
            adapting.saw(step)
            tokens += step.accepted + 1
            spent += step_ms(curve, 1 + step.drafted)
    return tokens / spent


class Recorder:
    """Wraps the speculator of an engine in this process; see the module docstring."""

    def __init__(self, runner: Any, filler: int) -> None:
        self.states, self.speculator, self.filler = runner.req_states, runner.speculator, filler
        self.drafts: dict[tuple[int, ...], dict[int, list[int]]] = {}
        self.inner = runner.speculator.propose

    def __enter__(self) -> Recorder:
        self.speculator.propose = self._propose
        return self

    def __exit__(self, *_: object) -> None:
        self.speculator.propose = self.inner

    def _propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        proposed = self.inner(input_batch, *args, **kwargs)
        if kwargs.get("dummy_run"):
            return proposed
        own, lengths = self.speculator.draft_tokens.tolist(), self.states.total_len.gpu.tolist()
        for row, request in enumerate(input_batch.idx_mapping.tolist()):
            prompt = int(self.states.prompt_len.np[request])
            if lengths[request] > prompt:
                text = tuple(self.states.all_token_ids.gpu[request, :prompt].tolist())
                self.drafts.setdefault(text, {})[lengths[request]] = own[row]
        return proposed.fill_(self.filler)

    def traces(self, outputs: Sequence[Any]) -> list[Trace]:
        """One trace per output of the engine."""
        found = []
        for output in outputs:
            prompt = tuple(output.prompt_token_ids)
            tokens = [*prompt, *output.outputs[0].token_ids]
            found.append(Trace(tokens, len(prompt), self.drafts[prompt]))
        return found
