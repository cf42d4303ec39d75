"""Plans from measured times, with the times made up."""

from __future__ import annotations

import json

import pytest
import torch

from glm_exl3.ops import tuning
from glm_exl3.ops.tuning import Problem, Step
from kernels import tune


def timer(step: Step, m: int) -> float:
    """Four cuts suit few tokens, two suit more; the decoded path wins from 64 on."""
    if step.path == tuning.DECODED:
        return 300.0
    wanted = 4 if m <= 8 else 2
    penalty = 1.5 if step.split_k == 0 else 1.0 + 0.1 * abs(step.split_k - wanted)
    return 5.0 * m * penalty


def test_a_dense_plan_follows_the_times():
    assert tune.dense_plan(timer) == [
        Step("streamed", 8, 4),
        Step("streamed", 32, 2),
        Step("decoded"),
    ]


def test_near_ties_keep_the_rule():
    plan = tune.dense_plan(lambda step, m: 100.0 - 0.1 * step.split_k)
    assert plan == [Step("streamed", 64), Step("decoded")]


def test_experts_stream_at_least_the_tokens_that_must_be_alike():
    plan = tune.routed_plan(lambda step, m: 1.0 if step.path == tuning.TILED else 2.0)
    assert plan == [Step("streamed", 8), Step("tiled")]


def test_rows_are_plans_and_replace_those_of_their_shape(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    problem = Problem("linear", 128, 256, 4, "mcg")
    row = tune.row_of(problem, tune.dense_plan(timer))
    assert tuning.steps_of(row) == tuple(tune.dense_plan(timer))
    others = [{**row, "capability": [8, 0]}, {**row, "n": 512}]
    table = {"rules": tuning.table()["rules"], "measured": [{**row, "date": "before"}, *others]}
    assert tune.merged(table, [row], (9, 0), [problem])["measured"] == [*others, row]
    assert tune.merged(table, [], (9, 0), [problem])["measured"] == others


def test_every_dense_matrix_of_the_model_has_a_case_and_none_comes_twice():
    for family in ("full", "all"):
        problems = [problem for problem, _, _ in tune.cases(family)]
        assert len(set(problems)) == len(problems) >= len(tune.FULL)
        assert {(p.k, p.n, p.bits) for p in problems} >= {case[:3] for case in tune.FULL}


@pytest.mark.parametrize("rows", [[], [{"op": "linear", "k": 1}]])
def test_the_file_reads_back(rows):
    table = {"rules": tuning.table()["rules"], "measured": rows}
    assert json.loads(tune.text_of(table)) == table


def test_the_stored_file_is_as_it_would_be_written():
    assert tune.text_of(json.loads(tuning.TABLE.read_text())) == tuning.TABLE.read_text()
