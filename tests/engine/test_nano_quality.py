"""The trained miniature served by the engine: it must be as good as when it was trained.

A small panel of held-out text (`tests/bench/nano_panel.json`, from the packages named in the
miniature's model card). The limits leave room for the panel's noise below bench/nano/metrics.json;
a fault in a layer, a codebook, the indexer or a drafter falls far below them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "bench" / "nano" / "model"
PANEL = json.loads((ROOT / "tests" / "bench" / "nano_panel.json").read_text())
DRAFTING = {
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
    "dflash": {
        "method": "dflash",
        "model": str(MODEL / "drafter"),
        "num_speculative_tokens": 7,
    },
}
LIMITS = {"mtp": 0.8, "dflash": 1.0}

pytestmark = pytest.mark.engine


def engine(name: str, **more: Any) -> dict[str, Any]:
    return {"model": str(MODEL / name), "limit_mm_per_prompt": {"image": 0, "video": 0}, **more}


@pytest.mark.parametrize("name", ["tr3", "full-4bpw", "full-3bpw"])
def test_keys_are_found_beyond_the_selected_tokens(run_engine: Any, name: str) -> None:
    needles = PANEL["needles"]
    result = run_engine(engine(name), [needle["prompt"] for needle in needles], 8)
    right = [
        list(line["tokens"])[: len(needle["answer"])] == needle["answer"]
        for line, needle in zip(result["lines"], needles, strict=True)
    ]
    assert sum(right) >= 5, right


@pytest.mark.parametrize("method", ["mtp", "dflash"])
def test_drafts_are_accepted_as_often_as_in_training(run_engine: Any, method: str) -> None:
    drafted = engine("full-4bpw", speculative_config=DRAFTING[method])
    counters = run_engine(drafted, PANEL["prompts"], 96)["counters"]
    steps = counters["vllm:spec_decode_num_drafts"]
    accepted = counters["vllm:spec_decode_num_accepted_tokens"] / steps
    assert accepted >= LIMITS[method], accepted
