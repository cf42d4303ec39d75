"""Prefix hits on the real engine with a DFlash2 drafter that has a window, and what others need.

One engine serves the whole file. Its drafter is the tiny one with a sliding window, as the
published drafter has; the pool is so small that requests push each other out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import HERE, perform
from glm_exl3.format import kv_plan
from kvcache.sequences import DRAFTS, UNIT, engine, make_models

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny BF16 target and its drafter with a window: quick, and the cache is the same."""
    return make_models(tmp_path_factory.mktemp("prefix"))


@pytest.fixture(scope="module")
def result(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One engine through all parts of `prefix_job`."""
    root = tmp_path_factory.mktemp("job")
    job = {
        "engine": engine(*folders),
        "unstored": {"length": 300},
        "turns": {"length": 1000, "answer": 4, "question": 20},
        "sequences": {"count": 8, "longest": 200, "seed": 3, "lengths": [1, 2, 4]},
    }
    env = {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    found: dict[str, Any] = json.loads(perform("prefix_job.py", job, root, env=env).read_text())
    return found


def test_hits_may_end_inside_a_block_beside_a_window(result: dict[str, Any]) -> None:
    pool = result["pool"]
    assert (pool["inside_blocks"], pool["unit"]) == (True, UNIT)
    assert "FineSlidingWindowSpec" in {name for name, _, _ in pool["groups"]}


def test_a_second_turn_reuses_the_first_and_answers_like_a_cold_one(
    result: dict[str, Any],
) -> None:
    turns = result["turns"]
    assert turns["reused_tokens"] == (turns["first_tokens"] - 1) // UNIT * UNIT
    assert turns["comparison"]["broken"] == []


def test_random_requests_answer_like_cold_ones(result: dict[str, Any]) -> None:
    found = result["sequences"]
    assert found["broken"] == []
    assert found["counts"]["hits"] > 0
    assert found["counts"]["inside_block"] > 0


def test_an_unstored_prompt_leaves_nothing_behind(result: dict[str, Any]) -> None:
    assert result["unstored"]["after_unstored"] == 0
    assert result["unstored"]["after_stored"] == (300 - 1) // UNIT * UNIT


def test_the_planner_knew_the_pool(result: dict[str, Any], folders: tuple[Path, Path]) -> None:
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    plan = kv_plan.plan_cache(
        kv_plan.geometry_of(*configs),
        kv_plan.CacheOptions(drafts=DRAFTS, in_flight_tokens=2048),
    )
    pool = result["pool"]
    assert plan.block_tokens == pool["block_tokens"]
    assert len(plan.groups) == len(pool["groups"])
    assert plan.block_bytes == pytest.approx(pool["block_bytes"], rel=0.02)
