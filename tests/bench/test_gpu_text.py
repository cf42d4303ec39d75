"""The table of text cases, how a row is judged, and a job in a process of its own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from e2e import child, gpu_text
from e2e.gpu_text import BASES, CASES, GROUPS, REFERENCE, Case

INPUTS = ("nano", "tr3", "tiny")
KNOWN = json.loads(REFERENCE.read_text())["models"]


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return gpu_text.parse([str(tmp_path), "--out", str(tmp_path / "texts.json")])


@pytest.fixture
def tiny(tmp_path: Path) -> None:
    """Stands for the tiny checkpoint, whose making takes seconds."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny-drafter").mkdir()


def found(case: Case, **changed: Any) -> dict[str, Any]:
    """What a case's process gives when all is well."""
    comparison: dict[str, Any] = {
        "positions": 768, "ties": 2, "wide": [], "broken": [], "median_difference": 0.001,
    }  # fmt: skip
    counters = {
        "vllm:spec_decode_num_drafts": 100,
        "vllm:spec_decode_num_draft_tokens": 200,
        "vllm:spec_decode_num_accepted_tokens": 100,
        "vllm:prefix_cache_hits": 4096,
    }
    result = {"comparison": comparison, "counters": counters, "device": "a GPU"}
    result |= {"lines": [{"tokens": [1]}]} if case in BASES else {}
    return result | changed


def test_what_is_asked_for_is_there() -> None:
    ones = {"nano-none", "nano-mtp", "nano-dflash", "nano-none-eager", "nano-none-cached"}
    assert ones | {"tiny-none", "tiny-mtp", "tiny-dflash"} < set(GROUPS["one"])
    rows = ("none", "mtp", "dflash")
    twos = [f"{model}-{row}-tp2" for model in ("nano", "tiny") for row in rows]
    assert GROUPS["two"] == ("nano-none", "tiny-none", *twos)
    assert all(CASES[name].name == name for names in GROUPS.values() for name in names)


@pytest.mark.parametrize("model", INPUTS)
def test_prompts_are_short_and_beyond_what_the_indexer_chooses(model: str) -> None:
    lengths = [len(prompt) for prompt in gpu_text.asked(model)]
    assert lengths[0] < 24 and lengths[-1] > 512
    assert max(lengths) + gpu_text.TOKENS <= gpu_text.LONGEST
    assert len(lengths) == (8 if model == "tiny" else 16)


@pytest.mark.parametrize("model", INPUTS)
def test_the_committed_lines_answer_these_prompts(model: str) -> None:
    lines = KNOWN[model]["lines"]
    assert len(lines) == len(gpu_text.asked(model))
    for line in lines:
        lengths = {len(line[key]) for key in ("tokens", "logprobs", "margins")}
        assert lengths == {gpu_text.TOKENS}
        assert all(margin >= 0 for margin in line["margins"])


@pytest.mark.parametrize("model", ("nano", "tr3"))
def test_the_committed_lines_are_of_these_weights(model: str, tmp_path: Path) -> None:
    folder = gpu_text.made(model, tmp_path)[0]
    assert gpu_text.digest(gpu_text.asked(model), folder) == KNOWN[model]["sha256"]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_engines_are_asked_for_what_the_name_says(case: Case, options: argparse.Namespace) -> None:
    made = gpu_text.engine(case, options)
    assert made["enforce_eager"] == case.eager
    assert made["enable_prefix_caching"] == case.cached == ("prefix_match_unit" in made)
    assert made.get("tensor_parallel_size", 1) == case.ranks
    assert ("speculative_config" in made) == case.drafts
    assert made["kv_cache_memory_bytes"] == 8 * 2**30


def test_a_row_passes_only_if_everything_holds() -> None:
    drafted, cached = CASES["nano-mtp"], CASES["nano-none-cached"]
    assert gpu_text.figures(drafted, found(drafted))["passed"]
    broken = found(drafted)["comparison"] | {"broken": ["prompt 1"]}
    assert not gpu_text.figures(drafted, found(drafted, comparison=broken))["passed"]
    for accepted in (0, 30, 180):
        counters = found(drafted)["counters"] | {"vllm:spec_decode_num_accepted_tokens": accepted}
        assert not gpu_text.figures(drafted, found(drafted, counters=counters))["passed"]
    assert gpu_text.figures(cached, found(cached))["tokens_from_cache"] == 4096
    assert not gpu_text.figures(cached, found(cached, counters={}))["passed"]


def visit(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, **failing: str) -> Any:
    """A visit whose engines answer at once; `failing` are errors by the case's name."""
    made = gpu_text.Visit(options)
    jobs: dict[str, Any] = {}

    def run(case: Case, **job: Any) -> dict[str, Any]:
        jobs[case.name] = job
        name = case.name.replace("-", "_")
        return {"error": failing[name]} if name in failing else found(case)

    monkeypatch.setattr(made, "run", run)
    monkeypatch.setattr(gpu_text, "digest", lambda _, folder: KNOWN[NAMES[folder.name]]["sha256"])
    return made, jobs


NAMES = {"full-4bpw": "nano", "tr3": "tr3", "tiny": "tiny"}


@pytest.mark.usefixtures("tiny")
def test_all_of_one_gpu_is_compared_with_the_committed_lines(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, jobs = visit(options, monkeypatch)
    assert made.all(options.cases) == 0
    assert list(jobs) and all(
        job["reference"] == KNOWN[CASES[name].model]["lines"] for name, job in jobs.items()
    )
    twice = {name for name, job in jobs.items() if job["keep"]}
    assert twice == {"nano-none", "tiny-none", "nano-none-cached", "tiny-none-cached"}
    record = json.loads(options.out.read_text())
    assert len(record["passed"]) == len(GROUPS["one"]) and all(record["passed"].values())


@pytest.mark.usefixtures("tiny")
def test_two_ranks_are_compared_with_one_of_the_same_gpu(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, jobs = visit(options, monkeypatch)
    assert made.all([CASES[name] for name in GROUPS["two"]]) == 0
    assert jobs["nano-mtp-tp2"]["reference"] == [{"tokens": [1]}]
    rows = json.loads(options.out.read_text())["cases"]
    assert rows["nano-mtp-tp2"]["against"] == "nano on one rank"


@pytest.mark.usefixtures("tiny")
def test_what_fails_is_named_and_ranks_without_lines_are_missing(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made, _ = visit(options, monkeypatch, nano_none="exit status 1: out of memory")
    assert made.all([CASES[name] for name in GROUPS["two"]]) == 1
    rows = json.loads(options.out.read_text())["cases"]
    wrong = {name for name, row in rows.items() if "error" in row}
    assert len(rows) == 8 and wrong == {name for name in rows if name.startswith("nano")}
    assert "nano-none: MISSING, exit status 1: out of memory" in capsys.readouterr().out


def test_lines_of_other_weights_are_refused(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = visit(options, monkeypatch)
    monkeypatch.setattr(gpu_text, "digest", lambda *_: "another")
    assert made.all([CASES["nano-none"]]) == 1
    assert "lines of another nano" in made.rows["nano-none"]["error"]


def test_nothing_starts_behind_the_seconds(options: argparse.Namespace) -> None:
    options.seconds = 0
    assert gpu_text.Visit(options).all([CASES["tr3-none"]]) == 1
    row = json.loads(options.out.read_text())["cases"]["tr3-none"]
    assert row["error"] == "no time was left"


WRITE = (
    "import json, os, sys; job = json.load(open(sys.argv[1])); "
    "json.dump({'got': job['x'], 'said': os.environ['SAID']}, open(sys.argv[2], 'w'))"
)


def test_a_job_goes_into_a_process_and_its_result_comes_out(tmp_path: Path) -> None:
    words = ("-c", WRITE, "{job}", "{out}")
    out = tmp_path / "made.json"
    assert child.run(words, {"x": 3}, out, 30, {"SAID": "yes"}) == {"got": 3, "said": "yes"}


def test_a_process_that_fails_hangs_or_writes_nothing_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "made.json"
    out.write_text("{}")  # of an earlier run
    failed = child.run(("-c", "raise SystemExit('no room')"), {}, out, 30, {})
    assert failed["error"] == "CalledProcessError: no room\n"
    assert child.run(("-c", ""), {}, out, 30, {})["error"].startswith("FileNotFoundError")
    hangs = "import time; time.sleep(60)"
    assert child.run(("-c", hangs), {}, out, 0.5, {})["error"].startswith("TimeoutExpired")
