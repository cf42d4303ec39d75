"""Lookup: the definition by brute force, the kernels by the definition, and point masses."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3.ref import lookup

WORDS = st.lists(st.integers(0, 3), max_size=60)


def by_hand(words: list[int]) -> tuple[int, int]:
    """Longest suffix of at most MAX_MATCH words that ends earlier; the latest such place."""
    best = (0, len(words))
    for end in range(1, len(words)):
        longest = 0
        while (
            longest < min(end, lookup.MAX_MATCH)
            and words[end - 1 - longest] == words[len(words) - 1 - longest]
        ):
            longest += 1
        if longest and longest >= best[0]:
            best = (longest, end)
    return best


@given(WORDS)
def test_the_longest_and_then_the_latest_place_is_found(words: list[int]) -> None:
    found = lookup.find(torch.tensor(words, dtype=torch.int32))
    assert (found.match, found.start) == by_hand(words)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 40), st.data())
def test_a_continuation_goes_round_the_rest_of_the_text(
    words: list[int], steps: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(words) - 1))
    wanted = [words[start + i % (len(words) - start)] for i in range(steps)]
    assert lookup.continuation(torch.tensor(words), start, steps).tolist() == wanted


def proposal(words: list[int], least: int) -> tuple[list[int], int]:
    tokens = torch.zeros(2, 64, dtype=torch.int32)
    tokens[1, : len(words)] = torch.tensor(words, dtype=torch.int32)
    lengths, requests = torch.tensor([0, len(words)]), torch.tensor([1, -1])
    drafts, taken = torch.full((2, 5), -3), torch.full((2,), 5, dtype=torch.int32)
    drafted = torch.tensor([[91, 92, 93], [94, 95, 96]])
    lookup.propose(tokens, lengths, requests, drafted, drafts, taken, least)
    assert drafts[1].tolist() == [-3] * 5
    assert taken[1] == -1
    return drafts[0].tolist(), int(taken[0])


def test_a_long_match_is_taken_and_a_short_one_left_to_the_drafter() -> None:
    words = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert proposal(words, 3) == ([4, 5, 6, 1, 2], 1)
    assert proposal(words, 4) == ([91, 92, 93, 93, 93], 0)


def test_every_unsampled_token_is_certain_and_nothing_else_is_left() -> None:
    logits = torch.full((2, 4, 9), float("-inf"))
    candidates = torch.tensor([[[0, 1], [0, 1]], [[2, 3], [4, 5]]])
    logits[1, :2].scatter_(1, candidates[1], 1.5)
    repeated = torch.tensor([[0, 0], [6, 7]])
    logits[1, 2:].scatter_(1, repeated[1][:, None], 0.0)
    drafts, requests = torch.tensor([[8, 4, 0, 1]]), torch.tensor([1])
    for taken in (0, 1):
        before = logits[1, :2].clone()
        lookup.point_masses(logits, candidates, repeated, requests, drafts, torch.tensor([taken]))
        chances = logits[1].softmax(-1)
        assert torch.equal(logits[1, :2], before) is (taken == 0)
        certain = range(4) if taken else range(2, 4)
        assert all(chances[step, drafts[0, step]] == 1.0 for step in certain)
    assert (logits[0] == float("-inf")).all()
    # the drafter clears what `candidates` names, and finds nothing else written
    logits[1, :2].scatter_(1, candidates[1], float("-inf"))
    assert (logits[1, :2] == float("-inf")).all()


def test_the_kernels_propose_what_the_reference_proposes(interpreted: Callable[..., str]) -> None:
    found = json.loads(interpreted("interpreted_lookup.py", "25"))
    assert found == {"equal": True, "taken": [-1, 0, 1]}
