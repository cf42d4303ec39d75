from __future__ import annotations

import random

import pytest
import torch

from nano.data import Batch
from nano.gate import NEEDLES, drafts_limit, loss_limit, needle_limit
from nano.panel import needles, spread


def test_limits_of_drafts_come_from_what_other_arithmetic_changes() -> None:
    chance = random.Random(0)
    own = [(chance.randrange(30, 200), 64) for _ in range(24)]
    served = [(accepted + chance.randrange(-9, 10), 64) for accepted, _ in own]
    found = drafts_limit(own, served)
    assert found["limit"] == pytest.approx(found["mean"] - 4 * found["sigma"], abs=1e-3)
    assert 0 < found["sigma"] < 0.05
    assert drafts_limit(own, own)["sigma"] == 0


def test_a_loss_may_rise_by_what_was_measured_and_its_noise() -> None:
    own = [1.0, 2.0, 3.0, 4.0]
    assert loss_limit(own, [x + 0.02 for x in own])["limit"] == pytest.approx(0.02)
    uneven = loss_limit(own, [1.0, 2.04, 3.0, 4.04])
    assert uneven["mean"] == pytest.approx(0.02)
    assert uneven["limit"] > 0.06


def test_keys_need_a_share_that_chance_never_reaches() -> None:
    assert 1 / NEEDLES <= needle_limit(0.88)["limit"] < 0.88


def test_a_register_is_cut_at_its_first_answer() -> None:
    tokens = torch.arange(9)[None]
    weights = torch.tensor([[0.0, 1, 1, 4, 4, 1, 4, 4]])
    assert needles(Batch(tokens, weights)) == [{"prompt": [0, 1, 2, 3], "answer": [4, 5]}]


def test_windows_are_spread_over_the_stream() -> None:
    assert spread(torch.arange(100), 3, 5, 10) == [list(range(s, s + 5)) for s in (10, 38, 66)]
