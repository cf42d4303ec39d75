"""The table of GPU jobs and its schedule, and that every program understands what it is given."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import shlex
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from e2e.plugged import ROOT
from h200 import caches, plans, programs, verdicts
from h200 import run as runner
from h200.job import Job
from h200.run import JOBS, filled
from h200.schedule import Running, State, next_job, plan, takes

NAMES = {name: f"/made-up/{name}" for name in ("out", "work", "files")}
NAMES |= {"python": "PYTHON", "root": str(ROOT), "name": "NAME", "port": "2012"}
NAMES |= {"gpu0": "0", "gpu1": "1"}
COUNTS = {"e2e.router": 1, "e2e.seam": 1, "e2e.kda": 1, "e2e.inside": 2, "kernels.products": 0}
COUNTS |= {"kernels.small": 0}
CALL_S = 565
"""Programs that read their arguments by place, and how many they take."""
TARGETLESS = frozenset({"pytest", "torch.distributed.run"})
ENGINES = frozenset({
    "e2e.inside", "e2e.serve", "e2e.gpu_text", "e2e.drafting", "e2e.draft_options", "e2e.hybrid",
    "kv.visit",
})  # fmt: skip
"""Programs whose engines may draft with DFlash2, which needs FlashInfer's choice of tokens."""


class Parsed(Exception):  # noqa: N818 - it ends a program where its work would begin
    """The arguments were understood."""


def modules(job: Job) -> list[tuple[str, list[str]]]:
    """The modules of this repository that a job runs, with their arguments."""
    command = filled(list(job.command), NAMES)
    found = []
    for place, word in enumerate(command[:-1]):
        if word == "-m" and command[place + 1] not in TARGETLESS:
            found.append((command[place + 1], command[place + 2 :]))
            break
        if word == "-m" and command[place + 1] == "torch.distributed.run":
            inner = command.index("-m", place + 1)
            found.append((command[inner + 1], command[inner + 2 :]))
            break
    return found


def understand(name: str, arguments: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    """Feed the program's own parser; SystemExit means that it did not take them."""
    if name in COUNTS:
        assert len(arguments) == COUNTS[name]
        importlib.import_module(name)
        return
    module: Any = importlib.import_module("kernels.__main__" if name == "kernels" else name)
    if hasattr(module, "parser"):
        module.parser().parse_args(list(arguments))
        return
    parse = argparse.ArgumentParser.parse_args

    def stop(self: Any, given: Any = None, namespace: Any = None) -> Any:
        raise Parsed(parse(self, given, namespace))

    patch.setattr(argparse.ArgumentParser, "parse_args", stop)
    patch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(Parsed):
        module.main()


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_every_program_takes_its_arguments(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, arguments in modules(job):
        understand(name, arguments, monkeypatch)


def test_every_stage_of_a_longer_program_takes_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from e2e import drafting
    from kv import visit

    for packed in (None, Path("/made-up/packed")):
        for stage in drafting.stages(Path("/made-up"), packed):
            name, *given = (*stage.command, *stage.flag, "/made-up/result.json")
            with monkeypatch.context() as patch:
                understand(name, given, patch)
    for step in visit.steps(Path("/made-up")):
        _, name, *given = (word.replace("{left}", "100") for word in step.command)
        if name not in TARGETLESS:
            with monkeypatch.context() as patch:
                understand(name, given, patch)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_everything_a_job_names_is_known_and_there(job: Job) -> None:
    whole = filled([list(job.command), dict(job.env), dict(job.data or {})], NAMES)
    text = json.dumps(whole)
    assert not [name for name in (*NAMES, "drafter") if "{" + name + "}" in text]
    words = [word for argument in whole[0] for word in shlex.split(argument)]
    inside = [Path(word) for word in words if word.startswith(str(ROOT))]
    assert all(path.exists() for path in inside)
    assert job.expect_s < job.limit_s


def test_vllm_knows_every_engine_argument_and_the_bench_every_measurement() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from e2e.inside import Bench
    from e2e.recode_steps import ENGINE, MEASURES
    from kvcache import turns

    known = {one.name for one in dataclasses.fields(EngineArgs)}
    engines = [dict(job.data) for job in JOBS if job.data and "engine" in job.data]
    assert not set(turns.job(Path("/made-up"), 100, 8)["engine"]) - known
    for asked in [*engines, {"engine": ENGINE, "measure": MEASURES}]:
        assert not set(asked["engine"]) - known
        assert all(hasattr(Bench, row["kind"]) for row in asked["measure"])


def test_vllm_takes_the_commands_that_serve() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    for command in (programs.WORKER, programs.HEAD, programs.ALONE):
        words = filled(list(command), NAMES)
        asked = parser.parse_args(words[words.index("serve") :])
        assert asked.headless == (command is programs.WORKER)
        ranks = 1 if command is programs.ALONE else 2
        assert (asked.nnodes, asked.tensor_parallel_size) == (ranks, ranks)


def test_jobs_have_names_of_their_own_and_need_known_ones() -> None:
    names = [job.name for job in JOBS]
    assert len(set(names)) == len(names)
    assert {need for job in JOBS for need in job.needs} <= set(names)


def test_a_plan_starts_what_is_needed_first_and_keeps_the_budget() -> None:
    starts = plan(JOBS, (0, 1), 560)
    for job in JOBS:
        if job.name in starts:
            assert starts[job.name] + job.expect_s <= 560
            assert all(starts[need] < starts[job.name] for need in job.needs)


@pytest.mark.parametrize(
    ("names", "gpus"), [(("ops", "engines", "model"), (0,)), (("pair",), (0, 1))]
)
def test_the_plans_of_a_visit_fit_and_leave_nothing(
    names: tuple[str, ...], gpus: tuple[int, ...]
) -> None:
    done: set[str] = set()
    for name in names:
        every = plans.planned([name], JOBS, tried=done)
        jobs = [job for job in every if job.name not in done or job.vital]
        starts = plan(jobs, gpus, CALL_S - runner.PACKING_S, done)
        assert set(starts) == {job.name for job in jobs} >= set(plans.PLANS[name]) - done
        for job in jobs:
            assert all(
                starts[n] < starts[job.name] for n in (*job.needs, *job.after) if n in starts
            )
        done |= set(starts)


@pytest.mark.parametrize("name", ["engines", "model"])
def test_a_call_fits_on_a_machine_that_got_caches_only(name: str) -> None:
    jobs = plans.planned([name], JOBS, tried=runner.CACHED)
    starts = plan(jobs, (0,), CALL_S - runner.PACKING_S)
    assert set(starts) == {job.name for job in jobs} >= set(plans.PLANS[name])


def engines(jobs: Sequence[Job]) -> list[Job]:
    """Those of `jobs` that start an engine."""
    found = [job for job in jobs if {name for name, _ in modules(job)} & ENGINES]
    step = [job for job in jobs if job.name == "recode.step"]
    return [job for job in found if job.name != "drafting.pack"] + step


@pytest.mark.parametrize("name", plans.PLANS)
def test_no_engine_starts_before_flashinfers_module_is_there(name: str) -> None:
    jobs = plans.planned([name], JOBS)
    assert engines(jobs)
    starts = plan(jobs, (0, 1), 3600)
    ready = starts["flashinfer"] + next(j.expect_s for j in jobs if j.name == "flashinfer")
    assert all(starts[job.name] >= ready for job in engines(jobs))
    assert all("flashinfer" in job.after for job in engines(JOBS))


def test_no_job_is_planned_twice_and_every_plan_works_on_a_bare_machine() -> None:
    names = [name for one in plans.PLANS.values() for name in one]
    assert len(set(names)) == len(names) and set(names) <= {job.name for job in JOBS}
    for name in plans.PLANS:
        first = [job.name for job in plans.planned([name], JOBS)]
        assert {"library", "caches", "flashinfer", "warm"} <= set(first)
        assert first.index("library") < first.index("warm")
    later = plans.planned(["model"], JOBS, tried=("warm", "flashinfer"))
    assert not {"warm", "flashinfer"} & {job.name for job in later}


def job(name: str, **more: Any) -> Job:
    return Job(name, ("true",), more.pop("expect_s", 10), 20, more.pop("priority", 0), **more)


def test_a_job_follows_what_failed_but_needs_what_succeeded() -> None:
    pending = [job("follows", after=("first",)), job("needs", needs=("first",))]
    first = job("first", expect_s=30)
    known = State(0, 100, (0,))
    assert next_job([*pending, first], known, ()) == (first, (0,))
    failed = State(0, 100, (0,), ended=frozenset({"first"}))
    assert next_job(pending, failed, ()) == (pending[0], (0,))
    assert next_job(pending[1:], failed, ()) is None
    late = State(80, 100, (0,))  # nobody waits for what cannot start any more
    assert next_job([*pending, first], late, ()) == (pending[0], (0,))


def test_nothing_long_starts_while_a_job_of_two_gpus_waits_for_what_runs() -> None:
    pair = job("pair", gpus=2, needs=("folders",), priority=1)
    pending = [pair, job("long", expect_s=90, priority=2), job("short", expect_s=20, priority=3)]
    folders = Running(job("folders", gpus=0), (), 30)
    found = next_job(pending, State(0, 500, (0, 1), (folders,)), ())
    assert found is not None and found[0].name == "short"


def test_jobs_without_times_share_a_gpu_with_each_other_only() -> None:
    shared = [Running(job("a", exclusive=False, gib=80), (0,), 9)]
    assert takes(job("b", exclusive=False, gib=50), 0, shared)
    assert not takes(job("c", exclusive=False, gib=60), 0, shared)
    assert not takes(job("d"), 0, shared)


def visit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *jobs: Job, budget: float = 60
) -> tuple[int, Path]:
    """Run `jobs` for real, without GPUs or caches of this machine."""
    monkeypatch.setattr(runner, "JOBS", jobs)
    monkeypatch.setattr(runner, "NAMES", tuple(one.name for one in jobs))
    monkeypatch.setattr(runner, "pack_caches", lambda _: None)
    for key in caches.VARIABLES.values():
        monkeypatch.setenv(key, str(tmp_path / "jit" / key))
    out = tmp_path / "out"
    given = [str(out), "--work", str(tmp_path / "work"), "--budget-s", str(budget)]
    return runner.main(given), out


def shell(name: str, script: str, **more: Any) -> Job:
    return Job(name, ("sh", "-c", script), 5, 20, more.pop("priority", 0), 0, **more)


def test_a_vital_job_that_fails_ends_everything_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = (
        shell("library", "echo no symbol; exit 1", vital=True),
        shell("beside", "sleep 50"),
        shell("kernels", "true", needs=("library",)),
    )
    code, out = visit(tmp_path, monkeypatch, *jobs)
    assert code == 1
    assert json.loads((out / "ended.json").read_text()) == {"library": 1}
    said = capsys.readouterr().out
    assert "all others stand on" in said and "FAILED" in said and "no symbol" in said
    assert (out / "all.tar.xz").is_file()
    assert (tmp_path / "work" / "tried").read_text() == "library\n"


def test_a_visit_says_what_every_job_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = """echo '{"passed": {"a": true, "b": false}}' > {out}/{name}.json
        mkdir {work}/parts; echo why > {work}/parts/b.log; exit 1"""
    jobs = (shell("text", script), shell("plain", "echo 42 things"))
    code, out = visit(tmp_path, monkeypatch, *jobs)
    found = json.loads((out / "verdicts.json").read_text())
    assert code == 1 and found["text"]["passed"] is False and found["plain"]["passed"] is None
    said = capsys.readouterr().out
    assert "1 of 2 passed; not b" in said and "42 things" in said
    with tarfile.open(out / "all.tar.xz") as packed:
        inner = packed.extractfile("h200/work/parts/b.log")
        assert inner is not None and inner.read() == b"why\n"
        assert "h200/verdicts.json" in packed.getnames()


def test_a_later_call_repeats_what_is_vital_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = (shell("library", "true", vital=True), shell("once", "true", needs=("library",)))
    for expected in ({"library": 0, "once": 0}, {"library": 0}):
        code, out = visit(tmp_path, monkeypatch, *jobs)
        assert code == 0 and json.loads((out / "ended.json").read_text()) == expected


@pytest.mark.parametrize(
    ("result", "passed", "figure"),
    [
        ({"verdict": {"passed": False, "decode_worst_ratio": 1.25}}, False,
         "decode_worst_ratio 1.25"),
        ({"within": True, "seconds": {"a": 1}}, True, ""),
        ({"met": True, "pack_s": 81.5}, True, "pack_s 81.5"),
        ({"rows": [{"kind": "decode", "requests": 1, "step_ms": 10.651}]}, None,
         "kind decode requests 1 step_ms 10.65"),
        ([{"scheme": "int8", "kl": 0.00075}], None, "scheme int8 kl 0.00075"),
        ({"rows": [{"kind": "allreduce", "tokens": 8, "choice": "custom", "us": 7.125}]}, None,
         "kind allreduce tokens 8 choice custom us 7.125"),
        ({"greedy_equal": True, "planted_caught": False}, False, ""),
        (None, None, ""),
    ],
)  # fmt: skip
def test_a_verdict_is_what_the_result_says(result: Any, passed: bool | None, figure: str) -> None:
    found = verdicts.verdict(0, 12, result, "the last line")
    assert found["passed"] is passed
    assert figure in "; ".join(found["figures"])
    assert verdicts.verdict(124, 12, result, "")["passed"] is False


def test_placeholders_are_filled_at_every_depth() -> None:
    assert filled({"a": ["{out}/x", 3]}, {"out": "o"}) == {"a": ["o/x", 3]}
