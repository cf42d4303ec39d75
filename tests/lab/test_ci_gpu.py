"""compose/ci-gpu.yaml as a runner calls it: the exit code tells whether the engine did its work.

With two versions of compose: Debian's, and the one of this checkout's environment.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import IMAGE, ROOT, Node

NEW = Path(sys.executable).parent / "docker-compose"
VERSIONS = {"Debian's": ["docker", "compose"], "the newest": [str(NEW)]}
FILES = ["--env-file", "/tmp/ci.env", "-f", f"{ROOT}/compose/ci-gpu.yaml", "-f", "/tmp/no-gpu.yaml"]
NO_GPU = "services: { engine: { deploy: !reset null } }\n"
ENGINE = "vllm serve /model --port 8000 --served-model-name lab"
SLEEP = "python3 -c 'import time; time.sleep(60)'"
NAME = "glm-exl3-ci-engine"


@pytest.fixture
def node(lab, tiny_model) -> Iterator[Node]:
    node = lab.nodes[0]
    folders = (ROOT / "compose", ROOT / "bench", tiny_model, NEW)
    node.bring_in(*folders)
    put(node, "/tmp/no-gpu.yaml", NO_GPU)
    yield node
    for path in folders:
        node.shell.run(["umount", str(path)])


def put(node: Node, path: str, text: str) -> None:
    assert node.shell.run(["sh", "-c", f"cat > {path}"], stdin=text).ok


@pytest.fixture(params=["Debian's", pytest.param("the newest", marks=pytest.mark.long)])
def compose(request, node) -> Iterator[list[str]]:
    command = [*VERSIONS[request.param], *FILES]
    yield command
    node.shell.run([*command, "down", "--volumes", "--timeout", "1"], timeout_s=60)


@pytest.fixture
def job(node, compose, tiny_model):
    """Starts a job; its output and exit code come from `ended`."""

    def start(bench: str, engine: str = ENGINE) -> subprocess.Popen[str]:
        env = {"GLM_IMAGE": IMAGE, "GLM_WEIGHTS": str(tiny_model), "GLM_COMMAND": engine,
               "GLM_BENCH_COMMAND": bench, "GLM_READY_TIMEOUT_S": "40"}  # fmt: skip
        put(node, "/tmp/ci.env", "".join(f"{key}={value}\n" for key, value in env.items()))
        command = node.shell.argv([*compose, "up", "--exit-code-from", "bench"])
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    return start


def ended(process: subprocess.Popen[str], node: Node) -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    assert node.shell.run(["docker", "ps", "-q"]).out == "", "the job left a container running"
    return process.returncode, output


def test_a_job_that_works_exits_with_0(job, node) -> None:
    code, output = ended(job("sh -c :"), node)
    assert code == 0, output
    assert "canary: 'lab" in output


@pytest.mark.parametrize(
    ("bench", "engine", "code"),
    [("sh -c 'exit 6'", ENGINE, 6), ("sh -c :", "vllm-that-is-not-there", 7)],
)
def test_a_failure_fails_the_job(job, node, bench, engine, code) -> None:
    found, output = ended(job(bench, engine), node)
    assert found == code, output


LONG = pytest.mark.long


@pytest.mark.parametrize("how", ["kill", pytest.param("stop --time 1", marks=LONG),
                                 pytest.param("kill what it runs", marks=LONG)])  # fmt: skip
@pytest.mark.parametrize("phase", [pytest.param("before READY", marks=LONG),
                                   "during the measurement"])  # fmt: skip
def test_an_engine_that_is_ended_fails_the_job(job, node, how, phase, said) -> None:
    if phase == "before READY":
        process = job("sh -c :", f"{ENGINE} --nnodes 2")
        while not engines(node):
            assert process.poll() is None, ended(process, node)
            time.sleep(0.2)
    else:
        process = job(SLEEP)
        said(process, "canary: 'lab")
    end(node, how)
    code, output = ended(process, node)
    assert code == 7, output


def engines(node: Node) -> list[str]:
    """Processes of the engine, without process 1 of its container."""
    rows = node.shell.run(["docker", "top", NAME, "-o", "pid,args"]).out.splitlines()
    return [row.split()[0] for row in rows if "/usr/bin/vllm" in row and "/ci/" not in row]


def end(node: Node, how: str) -> None:
    if how == "kill what it runs":
        assert node.shell.run(["kill", "-KILL", *engines(node)]).ok
    else:
        assert node.shell.run(["docker", *how.split(), NAME]).ok
