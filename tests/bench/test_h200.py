"""The table of GPU jobs and its schedule, and that every program understands what it is given."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from e2e.plugged import ROOT
from h200 import programs
from h200.job import Job
from h200.run import JOBS, filled
from h200.schedule import plan

NAMES = {name: f"/made-up/{name}" for name in ("out", "work", "files")}
NAMES |= {"python": "PYTHON", "root": str(ROOT), "name": "NAME", "port": "2012"}
NAMES |= {"gpu0": "0", "gpu1": "1"}
COUNTS = {"e2e.router": 1, "e2e.seam": 1, "e2e.kda": 1, "e2e.inside": 2, "kernels.products": 0}
COUNTS |= {"kernels.small": 0}
"""Programs that read their arguments by place, and how many they take."""
TARGETLESS = frozenset({"pytest", "torch.distributed.run"})


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

    for stage in drafting.stages(Path("/made-up")):
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
    assert not set(turns.job(Path("/made-up"), 100)["engine"]) - known
    for asked in [*engines, {"engine": ENGINE, "measure": MEASURES}]:
        assert not set(asked["engine"]) - known
        assert all(hasattr(Bench, row["kind"]) for row in asked["measure"])


def test_vllm_takes_the_commands_that_serve() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    for command in (programs.WORKER, programs.HEAD):
        words = filled(list(command), NAMES)
        asked = parser.parse_args(words[words.index("serve") :])
        assert asked.headless == (command is programs.WORKER)
        assert (asked.nnodes, asked.tensor_parallel_size) == (2, 2)


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


def test_placeholders_are_filled_at_every_depth() -> None:
    assert filled({"a": ["{out}/x", 3]}, {"out": "o"}) == {"a": ["o/x", 3]}
