"""The lookup kernels under Triton's interpreter against `ref`; run by test_lookup.py."""

from __future__ import annotations

import json
import random
import sys

import torch

from glm_exl3.ref import lookup as ref
from glm_exl3.spec import lookup as own

ROWS, LENGTH, STEPS, OWN, WIDTH, WORDS = 5, 96, 11, 7, 3, 40


def text(dice: random.Random, count: int) -> list[int]:
    if dice.random() < 0.3:
        return [dice.randrange(WORDS) for _ in range(count)]
    period = [dice.randrange(WORDS) for _ in range(dice.randrange(1, 20))]
    words = (period * count)[:count]
    if count and dice.random() < 0.5:
        words[dice.randrange(count)] = dice.randrange(WORDS)
    return words


def buffers(dice: random.Random) -> dict[str, torch.Tensor]:
    tokens = torch.full((ROWS, LENGTH), -7, dtype=torch.int32)
    lengths = torch.tensor(
        [dice.choice((0, 1, 2, 3, 17, 33, 64, 65, LENGTH)) for _ in range(ROWS)], dtype=torch.int32
    )
    for row, count in enumerate(lengths.tolist()):
        tokens[row, :count] = torch.tensor(text(dice, count), dtype=torch.int32)
    requests = torch.tensor([*dice.sample(range(ROWS), 3), -1]).repeat_interleave(OWN)[::OWN]
    candidates = torch.randint(WORDS, (ROWS, OWN, WIDTH))
    repeated = torch.randint(WORDS, (ROWS, STEPS - OWN))
    logits = torch.full((ROWS, STEPS, WORDS), float("-inf"))
    logits[:, :OWN].scatter_(2, candidates, torch.randn(candidates.shape))
    logits[:, OWN:].scatter_(2, repeated[..., None], 0.0)
    drafted = torch.randint(WORDS, (4, OWN))
    return {
        "tokens": tokens, "lengths": lengths, "requests": requests, "candidates": candidates,
        "repeated": repeated, "logits": logits, "drafted": drafted,
    }  # fmt: skip


def outcome(kernels: bool, given: dict[str, torch.Tensor], least: int) -> list[torch.Tensor]:
    copies = {name: value.clone() for name, value in given.items() if name != "requests"}
    requests = given["requests"]
    lookup = own.Lookup(ROWS, LENGTH, STEPS, torch.device("cpu"), 1)
    lookup.require(least)
    lookup.slice, lookup.slices = 32, 3
    lookup.scores = torch.full((ROWS, 3), 99, dtype=torch.int64)
    lookup.on_cpu = not kernels
    lookup.propose(copies["tokens"], copies["lengths"], requests, copies["drafted"])
    lookup.point_masses(copies["logits"], copies["candidates"], copies["repeated"], requests)
    return [lookup.drafts, lookup.taken, copies["logits"], copies["candidates"], copies["repeated"]]


def main() -> None:
    torch.manual_seed(0)
    dice, equal, taken = random.Random(0), True, set()
    for _ in range(int(sys.argv[1])):
        given, least = buffers(dice), dice.randrange(1, ref.MAX_MATCH + 1)
        theirs, ours = outcome(True, given, least), outcome(False, given, least)
        equal &= all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
        taken |= set(ours[1].tolist())
    json.dump({"equal": equal, "taken": sorted(taken)}, sys.stdout)


main()
