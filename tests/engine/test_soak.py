"""Random steps with aborts, preemption and a changing draft length: see soak.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import MINIATURE, START_TIMEOUT_S, perform

CI_STEPS, LONG_STEPS = 300, 10_000
LONG_S = 4 * 3600
LENGTHS = (2, 4, 7, 11)


def soak(folder: Path, steps: int, timeout_s: int) -> dict[str, Any]:
    schedule = [[i, i, k] for i, k in enumerate(LENGTHS, start=1)]
    job = {
        "engine": {
            "model": str(MINIATURE / "full-4bpw"), "language_model_only": True,
            "max_num_seqs": 4, "max_model_len": 512, "enable_prefix_caching": True,
            "disable_log_stats": False,
            "scheduler_cls": "glm_exl3.spec.adaptive.AdaptiveScheduler",
            "speculative_config": {
                "method": "dflash", "model": str(MINIATURE / "drafter"),
                "num_speculative_tokens": LENGTHS[-1],
                "num_speculative_tokens_per_batch_size": schedule,
                "draft_sample_method": "probabilistic",
            },
        },
        "steps": steps, "seed": 1, "vocabulary": [64, 1800], "poison": True,
    }  # fmt: skip
    env = {"GLM_EXL3_HYBRID_DRAFT": "1", "GLM_EXL3_HYBRID_MATCH": "3"}
    return json.loads(perform("soak.py", job, folder, env=env, timeout_s=timeout_s).read_text())


def judge(tally: dict[str, Any], steps: int) -> None:
    assert tally["wrong"] == []
    assert tally["steps"] >= steps
    assert set(tally["lengths"]) == set(map(str, LENGTHS))
    assert tally["accepted"] > 0
    assert min(tally["finished"], tally["aborted"], tally["preemptions"]) > 0


@pytest.mark.engine
def test_random_steps_stay_finite_in_range_and_go_on(tmp_path: Path) -> None:
    judge(soak(tmp_path, CI_STEPS, START_TIMEOUT_S), CI_STEPS)


@pytest.mark.long
@pytest.mark.timeout(LONG_S + 60)
def test_ten_thousand_random_steps(tmp_path: Path) -> None:
    judge(soak(tmp_path, LONG_STEPS, LONG_S), LONG_STEPS)
