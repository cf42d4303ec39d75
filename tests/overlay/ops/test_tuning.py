"""The table of measured plans: its data, the choice by shape, the one log line."""

from __future__ import annotations

import json
import logging
from datetime import date
from pathlib import Path

import pytest

from glm_exl3.ops import tuning
from glm_exl3.ops.tuning import ANY_NUMBER, Problem, Step

HOPPER = (9, 0)
DENSE = Problem("linear", 4096, 24576, 4, "mcg")
EXPERTS = Problem("moe", 4096, 2048, 3, "mul1")
LAYERS = Path(__file__).parents[3] / "bench" / "kernels" / "results" / "layers_h200.json"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    rows = [
        {
            **{"machine": "NVIDIA H200", "date": "2026-11-29", "capability": [9, 0]},
            **{"op": "linear", "k": 4096, "n": 24576, "bits": 4, "codebook": "mcg"},
            "steps": [
                {"path": "streamed", "tokens": 8, "split_k": 2},
                {"path": "streamed", "tokens": 64},
                {"path": "decoded"},
            ],
        }
    ]
    data = {"rules": tuning.table()["rules"], "measured": rows}
    monkeypatch.setattr(tuning, "table", lambda: data)
    tuning.plan.cache_clear()
    yield rows
    tuning.plan.cache_clear()


def test_every_row_of_the_data_is_a_plan() -> None:
    rows = tuning.table()
    assert {row["op"] for row in rows["rules"]} == set(tuning.PATHS)
    for row in (*rows["rules"], *rows["measured"]):
        assert tuning.steps_of(row)
    for row in rows["measured"]:
        assert row["machine"] and date.fromisoformat(row["date"])
        assert len(row["capability"]) == 2


def test_no_shape_is_measured_twice_for_one_capability() -> None:
    keys = [
        (*row["capability"], row["op"], row["k"], row["n"], row["bits"], row["codebook"])
        for row in tuning.table()["measured"]
    ]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (1, Step("streamed", 8, 2)),
        (8, Step("streamed", 8, 2)),
        (9, Step("streamed", 64)),
        (65, Step("decoded", ANY_NUMBER)),
    ],
)
def test_a_measured_shape_takes_its_step(measured, tokens: int, wanted: Step) -> None:
    assert tuning.step(DENSE, HOPPER, tokens) == wanted


@pytest.mark.parametrize(
    ("problem", "capability"),
    [
        (Problem("linear", 4096, 24576, 5, "mcg"), HOPPER),
        (Problem("linear", 4096, 24576, 4, "mul1"), HOPPER),
        (Problem("linear", 4096, 4096, 4, "mcg"), HOPPER),
        (DENSE, (12, 0)),
    ],
)
def test_everything_else_follows_the_rule(measured, problem: Problem, capability) -> None:
    assert tuning.step(problem, capability, 8) == Step("streamed", 64)
    assert tuning.step(problem, capability, 65).path == "decoded"


def test_a_plan_is_logged_once(measured, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.glm_exl3"):
        for tokens in (1, 2, 100):
            tuning.step(DENSE, HOPPER, tokens)
    assert len(caplog.records) == 1
    assert "linear 4096x24576 K4 mcg, measured on NVIDIA H200, 2026-11-29" in caplog.text
    assert "up to 8: streamed, k in 2" in caplog.text


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"path": "streamed", "tokens": 4}, {"path": "decoded"}], "must share the first step"),
        ([{"path": "streamed", "tokens": 64}], "end without a number"),
        ([{"path": "decoded"}, {"path": "streamed", "tokens": 64}], "must ascend"),
        ([{"path": "tiled"}], "linear has no tiled path"),
        ([{"path": "decoded", "product": "magic"}], "with magic"),
    ],
)
def test_a_row_that_breaks_the_rules_is_refused(steps: list[dict], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tuning.steps_of({"op": "linear", "steps": steps})


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [(1, ("streamed", 2)), (8, ("streamed", 2)), (9, ("streamed", 2)), (129, ("tiled", 0))],
)
def test_the_real_experts_are_cut_in_two(tokens: int, wanted: tuple) -> None:
    found = tuning.step(EXPERTS, HOPPER, tokens)
    assert (found.path, found.split_k) == wanted


@pytest.mark.parametrize("order", ["experts", "router"])
def test_the_cut_of_sixteen_tokens_is_the_fastest_measured(order: str) -> None:
    rows = json.loads(LAYERS.read_text())["rows"]
    times = {row["setting"]: row["us"][order] for row in rows if row["tokens"] == 16}
    chosen = times[f"k in {tuning.step(EXPERTS, HOPPER, 16).split_k}"]
    assert chosen <= 1.05 * min(times.values())
