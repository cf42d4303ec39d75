"""The load format `exl3_dummy` through the engine: every parameter gets a finite value.

Random layers with random drafts: drafting must not change the greedy text, and log-probabilities
are those of a model whose activations stay in range.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from conftest import prompts
from glm_exl3.dummy.folder import write_drafter, write_target
from glm_exl3.ref.tiny.geometry import geometry
from glm_exl3.ref.tiny.recipe import Family

pytestmark = pytest.mark.engine


def test_random_weights_generate_the_same_with_and_without_drafts(
    run_engine: Any, tmp_path: Path
) -> None:
    write_target(tmp_path / "target", Family.FULL, geometry())
    write_drafter(tmp_path / "drafter", geometry(), packed=True)
    engine = {"model": str(tmp_path / "target"), "load_format": "exl3_dummy"}
    asked = prompts((9, 33))
    plain = run_engine(engine, asked, 8)
    for line in plain["lines"]:
        assert all(math.isfinite(value) for value in line["logprobs"])
        assert len(set(line["tokens"])) > 4
    drafting = {"method": "dflash", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 7}
    drafted = run_engine(
        {**engine, "speculative_config": drafting}, asked, 8, reference=plain["lines"]
    )
    assert not drafted["comparison"]["broken"]
