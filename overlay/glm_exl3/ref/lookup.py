"""Prompt and output lookup: what followed the last time the text ended like this.

The longest suffix of a request's tokens that occurs earlier, up to `MAX_MATCH` tokens, is looked
up; among equally long ones the latest wins, because an edited passage stands nearer than the
original. What followed it is proposed. Where the proposal runs into the end of the text, the text
has a period, and the proposal goes round it.

What must stay true: the answer depends on the tokens alone, so that all ranks propose the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_MATCH = 16


@dataclass(frozen=True)
class Found:
    """`match` tokens of the suffix occur before `start`, the position of the first proposal."""

    match: int
    start: int


def find(tokens: Tensor) -> Found:
    """The best earlier occurrence of the end of `tokens` `[n]` integers; match 0: none."""
    count = tokens.shape[0]
    if count < 2:
        return Found(0, count)
    ends = torch.arange(count - 1)
    alive = torch.ones(count - 1, dtype=torch.bool)
    match = torch.zeros(count - 1, dtype=torch.long)
    for back in range(min(MAX_MATCH, count)):
        places = ends - back
        alive &= (places >= 0) & (tokens[places.clamp_min(0)] == tokens[count - 1 - back])
        match += alive
    best = int((match * count + ends).argmax())
    return Found(int(match[best]), best + 1 if match[best] else count)


def continuation(tokens: Tensor, start: int, steps: int) -> Tensor:
    """`steps` tokens from `start` on, going round `tokens[start:]`; `start` must be inside."""
    return tokens[start + torch.arange(steps) % (tokens.shape[0] - start)]


def propose(  # noqa: PLR0913, PLR0917 - the kernel's arguments
    tokens: Tensor,
    lengths: Tensor,
    requests: Tensor,
    drafted: Tensor,
    drafts: Tensor,
    taken: Tensor,
    least: int,
) -> None:
    """Fill `drafts` `[R, k]`: a lookup where the match is `least` or longer, else `drafted`.

    tokens `[S, L]` and lengths `[S]` belong to requests, requests `[R]` says which; a negative one
    is padding and leaves its row alone. drafted `[R, d]` with d <= k is the drafter's; behind it
    its last token is repeated. taken `[R]` becomes 1 for a lookup, 0 for none, -1 for padding.
    """
    steps, own = drafts.shape[1], drafted.shape[1]
    for row, request in enumerate(requests.tolist()):
        if request < 0:
            taken[row] = -1
            continue
        text = tokens[request, : int(lengths[request])]
        found = find(text)
        taken[row] = int(found.match >= least)
        if found.match >= least:
            drafts[row] = continuation(text, found.start, steps).to(drafts.dtype)
        else:
            drafts[row, :own] = drafted[row]
            drafts[row, own:] = drafted[row, -1]


def point_masses(  # noqa: PLR0913, PLR0917 - the kernel's arguments
    logits: Tensor,
    candidates: Tensor,
    repeated: Tensor,
    requests: Tensor,
    drafts: Tensor,
    taken: Tensor,
) -> None:
    """Make the proposal distribution of every token that was not sampled a point mass.

    logits `[S, k, V]` are -inf except where the drafter wrote; candidates `[S, d, K]` are the ids
    it wrote for the first d steps and clears the next time. Where `taken`, those are cleared and
    replaced by the one token; beyond d, `repeated` `[S, k - d]` remembers what to clear.
    """
    own, steps = candidates.shape[1], drafts.shape[1]
    for row, request in enumerate(requests.tolist()):
        if request < 0:
            continue
        for step in range(own if not taken[row] else 0, steps):
            token = drafts[row, step]
            old = candidates[request, step] if step < own else repeated[request, step - own]
            logits[request, step, old] = float("-inf")
            logits[request, step, token] = 0.0
            old.fill_(token)
