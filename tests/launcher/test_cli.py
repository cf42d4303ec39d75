"""The command line itself: help, unknown verbs, speed, and what it must not import."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from glm_launch import cli, verbs

ROOT = Path(__file__).parents[2]


def test_an_unknown_verb_prints_the_help_and_exits_2(launcher) -> None:
    done = launcher("serve")
    assert done.returncode == 2
    assert "unknown verb: serve" in done.stderr and "doctor" in done.stdout


def test_help_names_every_verb_and_the_script(launcher) -> None:
    done = launcher("--help")
    assert done.returncode == 0
    assert "./start.sh" in done.stdout
    assert all(f" {verb} " in done.stdout for verb in cli.known_verbs())


def test_the_script_explains_every_verb_without_python() -> None:
    header = (ROOT / "start.sh").read_text().split("set -euo")[0]
    assert all(f" {verb} " in header.replace("\n", " ") for verb in cli.known_verbs())


def test_help_is_fast(launcher) -> None:
    def processor_time() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    begin = processor_time()
    launcher("--help")
    assert processor_time() - begin < 0.3


def test_the_launcher_imports_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, glm_launch.demo, glm_launch.verbs, glm_launch.checkpoint, glm_bench.cli; "
        "assert not {'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={
        "PYTHONPATH": ":".join(str(ROOT / name) for name in ("launcher", "bench", "overlay"))
    })  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ([], {}, ["--ignore=tests/repository", "-n2", "--no-loadscope-reorder"]),
        (["-k", "plan"], {}, ["--ignore=tests/repository", "-k", "plan"]),
        (["--lint", "-x"], {}, ["-x"]),
        (["--lint"], {}, ["-n2", "--no-loadscope-reorder"]),
        ([], {"CI": "true"}, ["-n2", "--no-loadscope-reorder"]),
    ],
)
def test_static_checks_run_when_asked_and_in_ci(arguments, environ, expected) -> None:
    assert verbs.test_arguments(arguments, environ) == expected


def test_plan_prints_commands_and_changes_nothing(launcher) -> None:
    done = launcher("plan", VLLM_API_KEY="planted-secret")
    assert "--node-rank 1" in done.stdout and "VLLM_API_KEY=(secret)" in done.stdout
    assert done.stdout.index(": rank1, worker") < done.stdout.index(": rank0, head")
    assert not launcher.state.exists()


def test_logs_of_an_unknown_rank_name_the_known_ones(launcher) -> None:
    assert "no-logs" in launcher("logs").stderr
    launcher("start")
    done = launcher("logs", "rank7")
    assert done.returncode == 3 and "head, rank0, rank1, worker" in done.stderr
    launcher("stop")
