"""The programs of the KV cache's GPU visit, as far as they are arithmetic and processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kv import measure, visit
from kvcache import sequences, turns


def row(kind: str, ratio: float | None, heads: int = 64) -> dict[str, Any]:
    found: dict[str, Any] = {"op": "attention", "kind": kind, "heads": heads}
    limit = measure.DECODE_LIMIT if kind == "decode" else measure.PREFILL_LIMIT
    return found if ratio is None else found | {"ratio": ratio, "limit": limit}


@pytest.mark.parametrize(
    ("ratios", "passed"),
    [
        ([("decode", 1.4), ("prefill", 1.9)], True),
        ([("decode", 1.6), ("prefill", 1.9)], False),
        ([("decode", 1.4), ("prefill", 2.1)], False),
        ([("decode", 1.4)], False),
        ([("decode", 1.4), ("prefill", None)], False),
        ([], False),
    ],
)
def test_a_verdict_needs_every_row_within_its_limit(
    ratios: list[tuple[str, float | None]], passed: bool
) -> None:
    assert measure.verdict([row(*one) for one in ratios], 9)["passed"] is passed


def test_a_verdict_tells_heads_apart() -> None:
    found = [row("decode", 1.2), row("prefill", 1.3), row("decode", 4.5, 32)]
    said = measure.verdict(found, 3)
    assert (said["decode_worst_ratio"], said["passed"]) == (4.5, False)
    assert said["by_heads"] == {
        "64": {"decode_worst_ratio": 1.2, "prefill_worst_ratio": 1.3},
        "32": {"decode_worst_ratio": 4.5, "prefill_worst_ratio": None},
    }


def planned(*words: str) -> list[Any]:
    asked = measure.parser().parse_args(["out.json", *words])
    return [make.args[0] for make in measure.rows(asked.heads, asked.quick)]


def test_one_rank_of_all_contexts_is_measured_first() -> None:
    shapes = [case for case in planned() if isinstance(case, measure.Shape)]
    heads = [shape.heads for shape in shapes]
    assert set(heads[: heads.count(64)]) == {64}
    assert heads.count(64) == heads.count(32) == heads.count(16) == 27
    for count in (64, 32, 16):
        own = [s for s in shapes if s.heads == count]
        decodes = {(s.requests, s.context >> 10) for s in own if s.kind == "decode"}
        assert decodes == {(n, k) for n in (1, 4, 16) for k in (8, 32, 128, 512)}
        assert {s.context >> 10 for s in own if s.kind == "prefill"} == {8, 32, 128}


def test_a_visit_that_ends_early_has_both_numbers_of_heads_asked_for() -> None:
    """A row takes more than a second."""
    shapes = planned("--heads", "32,16", "--seconds", "60")
    assert {s.heads for s in shapes} == {32, 16} and len(shapes) == 54
    for context, first in ((128, 14), (8, 28), (512, 40)):
        some = {
            (s.heads, s.kind, s.requests, s.each)
            for s in shapes[:first]
            if s.context >> 10 == context
        }
        assert len(some) == (12 if context == 512 else 14)


def test_a_quick_run_has_two_contexts() -> None:
    shapes = planned("--quick", "--heads", "16")
    assert {(s.heads, s.context >> 10) for s in shapes} == {(16, 8), (16, 128)}


@pytest.mark.parametrize("text", ["", "64,", "8", "64;32", "x"])
def test_heads_that_no_rank_has_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        planned("--heads", text)
    assert "64,32,16" in capsys.readouterr().err


def test_a_step_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    child = "[sys.executable, '-c', 'import time; time.sleep(99)']"
    code = f"import subprocess, sys; subprocess.run({child})"
    step = visit.Step("hangs", ("-c", code), 1.0)
    assert visit.run(step, tmp_path, 100.0) == (visit.TIMED_OUT, "")
    assert visit.run(visit.Step("says", ("-c", "print('x\\ny')"), 60), tmp_path, 60.0) == (0, "y")


def test_the_second_turn_leaves_room_for_others_on_its_gpu(tmp_path: Path) -> None:
    step = next(one for one in visit.steps(tmp_path) if one.name == "turns")
    asked = turns.parser().parse_args(step.command[2:])
    engine = turns.job(tmp_path, asked.length, asked.memory_gib)["engine"]
    assert engine["kv_cache_memory_bytes"] == 8 * 2**30
    assert engine["gpu_memory_utilization"] == 0.1
    assert "gpu_memory_utilization" not in turns.job(tmp_path, asked.length)["engine"]


def test_figures_are_those_of_steps_that_ran(tmp_path: Path) -> None:
    verdict = {"decode_worst_ratio": 1.2, "prefill_worst_ratio": None}
    (tmp_path / "kernels.json").write_text(json.dumps({"verdict": verdict}))
    (tmp_path / "turns.json").write_text(json.dumps({"prefix_reuse_second_turn": 0.97}))
    found = visit.figures(tmp_path, {"tests": 1, "turns": 0})
    assert found["kernel_tests_passed"] is False
    assert found["prefix_reuse_second_turn"] == 0.97
    assert "decode_worst_ratio" not in found
    assert visit.figures(tmp_path, {"kernels": 1})["decode_worst_ratio"] == 1.2


def test_figures_are_those_of_one_rank_beside_others(tmp_path: Path) -> None:
    found = [row("decode", 1.2), row("prefill", 1.3), row("decode", 4.5, 32)]
    (tmp_path / "kernels.json").write_text(json.dumps({"verdict": measure.verdict(found, 3)}))
    figures = visit.figures(tmp_path, {"kernels": 1})
    assert (figures["decode_worst_ratio"], figures["prefill_worst_ratio"]) == (1.2, 1.3)
    assert figures["worst_ratio_by_heads"]["32"]["decode_worst_ratio"] == 4.5


def test_pieces_of_sequences_add_up() -> None:
    piece = dict.fromkeys(sequences.SUMMED, 2) | {
        "from_host": 1, "preemptions": 0, "drafted": 3, "broken": ["x"],
        "counts": {"aborted": 4, "kinds": {"turn": 1}},
    }  # fmt: skip
    total = sequences.summed([piece, piece])
    assert (total["sequences"], total["aborted"], total["broken"]) == (4, 8, ["x", "x"])
