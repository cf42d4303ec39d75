"""What the long programs count: the busy engine keeps to its limits, each verdict can fail."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "lab"))

import busyrank
import chaos
import detect
import endurance
import engine_queue
import figures

from glm_launch.supervise.troubles import Rules

GOOD = {
    "same_launch": True, "false_restarts": 0, "errors_told": [], "failed_requests": 0,
    "answers": 9, "killed_worker_told_s": 0.8,
}  # fmt: skip


@given(st.integers(0, 2**32))
def test_only_a_compiler_stalls_it_for_longer_than_the_limit(seed: int) -> None:
    rules = Rules()
    for part in itertools.islice(busyrank.schedule(random.Random(seed)), 200):
        if part.kind == "compile":
            assert part.settle_s < rules.stall_s
            assert part.seconds + part.settle_s < rules.compile_ceiling_s
        elif part.kind in ("prefill", "collect"):
            assert part.seconds < rules.stall_s


def test_two_hours_hold_every_kind_of_pause() -> None:
    seconds, kinds, compilers = 0.0, set(), []
    for part in busyrank.schedule(random.Random(1)):
        seconds += part.seconds + part.settle_s
        kinds.add(part.kind)
        compilers += [part.seconds] if part.kind == "compile" else []
        if seconds > 7200:
            break
    assert kinds == set(busyrank.WEIGHTS)
    assert len(compilers) >= 5 and max(compilers) > 600


def test_pauses_are_read_out_of_the_log() -> None:
    log = "INFO BUSY compile 75.0\nINFO x\nINFO BUSY late counters 3.5\nINFO BUSY compile 5.0\n"
    found = endurance.pauses(log)
    assert found["compile"] == {"count": 2, "sum_s": 80, "max_s": 75.0}
    assert found["late counters"]["count"] == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("same_launch", False), ("false_restarts", 1), ("false_restarts", None),
        ("errors_told", ["error [stalled] x"]), ("failed_requests", 1), ("answers", 0),
        ("killed_worker_told_s", None), ("killed_worker_told_s", 5.1),
    ],
)  # fmt: skip
def test_the_verdict_fails_for_each_thing_that_went_wrong(key: str, value: object) -> None:
    assert endurance.passes(GOOD)
    assert not endurance.passes(GOOD | {key: value})


QUEUE = {
    "same_launch": True, "false_restarts": 0, "errors_told": [], "answers": {"200": 9},
    "full_queue_percent": 90.0, "killed_worker_told_s": 1.0, "answers_again": True,
    "killed_worker_back_s": 100.0, "cold_start_s": 60.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("same_launch", False), ("false_restarts", 1), ("errors_told", ["x"]),
        ("answers", {"200": 9, "ReadTimeout": 1}), ("answers", {}), ("full_queue_percent", 40.0),
        ("killed_worker_told_s", None), ("killed_worker_told_s", 6.0), ("answers_again", False),
        ("killed_worker_back_s", 121.0),
    ],
)  # fmt: skip
def test_the_verdict_of_the_real_engine_fails_for_each_thing(key: str, value: object) -> None:
    assert engine_queue.passes(QUEUE)
    assert not engine_queue.passes(QUEUE | {key: value})


@pytest.mark.parametrize(
    ("told_s", "back_s", "late"), [(5.0, 70.0, []), (5.1, 1.0, ["x"]), (1.0, 70.1, ["x"])]
)
def test_a_figure_over_its_limit_is_named(told_s: float, back_s: float, late: list[str]) -> None:
    assert detect.too_late({"x": detect.figure(told_s, 5.0, back_s, 10.0)}) == late


def test_two_runs_of_faults_count_together() -> None:
    one = {
        "faults": 3, "kinds": {"kill head": 3}, "violations": [], "restarts": 3, "answers": 5,
        "errors": 1, "seeds": [1], "back_s": {"median": [2.0], "max": 9.0}, "slowest_answer_s": 1.0,
    }  # fmt: skip
    two = one | {"kinds": {"power cut": 3}, "violations": ["3 power cut: x"], "seeds": [2]}
    both = chaos.together(one, two)
    assert (both["faults"], both["answers"], both["seeds"]) == (6, 10, [1, 2])
    assert both["kinds"] == {"kill head": 3, "power cut": 3}
    assert both["violations"] == ["3 power cut: x"] and both["back_s"]["max"] == 9.0
    assert chaos.together({}, one) == one


def test_the_table_of_the_page_is_what_was_measured() -> None:
    page, known = figures.PAGE.read_text(), json.loads(figures.RESULTS.read_text())["stayup"]
    assert figures.written(page, known) == page
    assert page.count(figures.BEGIN) == page.count(figures.END) == 1
