"""Drafts for the trained miniature are accepted as often as its training modules measured."""

from __future__ import annotations

from typing import Any

import pytest

from nano_gate import GATE, MODEL, PANEL, engine

DRAFTING = {
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
    "dflash": {
        "method": "dflash",
        "model": str(MODEL / "drafter"),
        "num_speculative_tokens": 7,
    },
}

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("method", [pytest.param("mtp", marks=pytest.mark.long), "dflash"])
def test_drafts_are_accepted_as_often_as_in_training(run_engine: Any, method: str) -> None:
    drafted = engine("full-4bpw", speculative_config=DRAFTING[method])
    counters = run_engine(drafted, PANEL["prompts"], 96)["counters"]
    steps = counters["vllm:spec_decode_num_drafts"]
    accepted = counters["vllm:spec_decode_num_accepted_tokens"] / steps
    assert accepted >= GATE[method]["limit"], accepted
