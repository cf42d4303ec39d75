"""The trained miniature served by the engine: it must be as good as when it was trained.

A small panel of held-out text. The limits are what the training modules measured, less four
standard deviations of a panel of this size. A fault in a layer, a codebook or the indexer falls far
below them.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from nano_gate import GATE, PANEL, engine

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "name",
    ["full-4bpw", *(pytest.param(name, marks=pytest.mark.long) for name in ("tr3", "full-3bpw"))],
)
def test_a_packed_model_is_as_good_as_measured(run_engine: Any, name: str) -> None:
    """Keys are found beyond the selected tokens; text is as likely as the noise allows."""
    needles = PANEL["needles"]
    prompts = [needle["prompt"] for needle in needles]
    result = run_engine(engine(name), prompts, 8, texts=PANEL["texts"])
    right = [
        list(line["tokens"])[: len(needle["answer"])] == needle["answer"]
        for line, needle in zip(result["lines"], needles, strict=True)
    ]
    assert sum(right) >= GATE["needle"]["limit"] * len(needles), right
    above = [a - b for a, b in zip(result["losses"], GATE["bf16_losses"], strict=True)]
    assert statistics.mean(above) <= GATE["loss_above_bf16"][name]["limit"], above
