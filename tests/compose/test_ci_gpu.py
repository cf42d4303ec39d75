"""compose/ci-gpu.yaml asks for the right things, and its client fails whenever the engine does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPOSE = Path(sys.executable).parent / "docker-compose"
RANK = ROOT / "tests" / "lab" / "fakerank.py"
CI = ROOT / "compose" / "ci"
SLEEP = "import time; time.sleep(60)"


def test_the_engine_is_the_container_of_a_node() -> None:
    env = {"PATH": "/usr/bin:/bin", "GLM_IMAGE": "glm-exl3:cuda", "GLM_WEIGHTS": "/models",
           "GLM_COMMAND": "vllm serve /model"}  # fmt: skip
    command = [COMPOSE, "--env-file", "/dev/null", "-f", "compose/ci-gpu.yaml", "config",
               "--format", "json"]  # fmt: skip
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    engine, bench = services["engine"], services["bench"]
    assert engine["restart"] == "no" and engine["attach"] is False and "deploy" in engine
    assert engine["entrypoint"][-1] == "/opt/glm-exl3/entrypoint.py"
    assert {"/model", "/ci", "/job", "/cache"} <= {mount["target"] for mount in engine["volumes"]}
    assert engine["security_opt"] == bench["security_opt"] == ["no-new-privileges:true"]
    assert all(mount["read_only"] for mount in bench["volumes"])
    assert not any(service.get("privileged") for service in services.values())


@dataclass
class Job:
    """The two containers as processes; `folder` is the volume that both see."""

    folder: Path
    port: int
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def process(self, argv: list[str], **env: str) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [sys.executable, *argv], env={"PATH": os.environ["PATH"]} | env, text=True,
            stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.processes.append(started)
        return started

    def engine(self, command: list[str] | None = None, **env: str) -> subprocess.Popen[str]:
        """Process 1 of the engine's container around a fake rank, or another command."""
        rank = [sys.executable, str(RANK), "serve", "m", "--port", str(self.port),
                "--master-port", "0"]  # fmt: skip
        code = (
            f"import pathlib, sys; sys.path.insert(0, {str(CI)!r}); import engine\n"
            f"sys.exit(engine.main({command or rank!r}, pathlib.Path({str(self.folder)!r})))"
        )
        return self.process(["-c", code], **env)

    def bench(
        self, command: str = "true", limit_s: float = 20.0, first: str = ""
    ) -> subprocess.Popen[str]:
        """The client; `first` is Python run before it, in the same process."""
        code = (
            f"import sys; sys.path.insert(0, {str(CI)!r}); import bench\n{first}\n"
            "bench.POLL_S, bench.OLD_S, bench.BEGIN_S = 0.1, 4.0, 5.0\n"
            "sys.exit(bench.main())"
        )
        return self.process(
            ["-c", code], GLM_API=self.url, GLM_BENCH_COMMAND=command,
            GLM_READY_TIMEOUT_S=str(limit_s), GLM_JOB_DIR=str(self.folder),
        )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def job(tmp_path) -> Iterator[Job]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = Job(tmp_path, port)
    yield job
    for process in job.processes:
        kill_container(process)


def kill_container(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill_engine(process: subprocess.Popen[str]) -> None:
    """Kill what process 1 started, as an out-of-memory kill does."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    os.kill(int(children), signal.SIGKILL)


def stop_container(process: subprocess.Popen[str]) -> None:
    process.terminate()
    assert process.wait(20) == 0


def exit_0(process: subprocess.Popen[str]) -> None:
    """The engine ends with 0 as after an error; it listens at the port in its arguments."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    argv = Path(f"/proc/{int(children)}/cmdline").read_bytes().split(b"\0")
    port = int(argv[argv.index(b"--port") + 1])
    body = json.dumps({"do": "exit"}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/fake", body, method="POST")
    with contextlib.suppress(OSError):
        urllib.request.urlopen(request, timeout=5)


ENDS = {"engine killed": kill_engine, "container killed": kill_container,
        "container stopped": stop_container, "engine exits with 0": exit_0}  # fmt: skip
End = Callable[[subprocess.Popen[str]], None]


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def until(what: Callable[[], object]) -> None:
    begin = time.monotonic()
    while not what():
        assert time.monotonic() - begin < 20
        time.sleep(0.02)


def test_an_engine_that_answers_is_measured(job) -> None:
    job.engine()
    code, output = ended(job.bench())
    assert code == 0 and "canary: 'lab lab" in output


@pytest.mark.parametrize(("command", "code"), [("false", 1), ("sh -c 'exit 6'", 6),
                                               ("sh -c 'kill -9 $$'", 137)])  # fmt: skip
def test_a_failed_measurement_fails_the_job(job, command, code) -> None:
    job.engine()
    found, output = ended(job.bench(command))
    assert found == code and "Application startup complete" in output


def test_no_answer_in_time_fails_the_job(job) -> None:
    job.engine(["sleep", "60"])
    code, output = ended(job.bench(limit_s=2))
    assert code == 4 and "no answer" in output


def test_no_container_fails_the_job(job) -> None:
    code, output = ended(job.bench(limit_s=60))
    assert code == 7 and "does not run" in output


@pytest.mark.parametrize("end", ["engine killed", "container killed", "container stopped"])
def test_an_engine_that_ends_before_it_is_ready_fails_the_job(job, end) -> None:
    engine = job.engine(["sleep", "60"])
    until((job.folder / "alive").exists)
    bench = job.bench(limit_s=60)
    time.sleep(0.5)
    ENDS[end](engine)
    assert ended(bench)[0] == 7


@pytest.mark.parametrize("command", [["false"], ["true"], ["sh", "-c", "echo planted; exit 78"]])
def test_an_engine_that_ends_at_once_fails_the_job_with_its_last_words(job, command) -> None:
    job.engine(command)
    code, output = ended(job.bench(limit_s=60))
    assert code == 7 and ("planted" in output) == ("echo planted; exit 78" in command)


@pytest.mark.parametrize("end", list(ENDS))
def test_an_engine_that_ends_during_the_canary_fails_the_job(job, end) -> None:
    engine = job.engine(FAKE_TROUBLE="stall")
    bench = job.bench()
    until(lambda: running(job.url) == 1)
    ENDS[end](engine)
    assert ended(bench)[0] in (5, 7)


@pytest.mark.parametrize("end", list(ENDS))
def test_an_engine_that_ends_during_the_measurement_fails_the_job_soon(job, end, said) -> None:
    engine = job.engine()
    bench = job.bench(f'{sys.executable} -c "{SLEEP}"')
    said(bench, "canary: ")
    begin = time.monotonic()
    ENDS[end](engine)
    assert ended(bench)[0] == 7
    assert time.monotonic() - begin < 15


@pytest.mark.parametrize("end", list(ENDS))
def test_an_engine_that_ends_after_a_good_measurement_fails_the_job(job, end, said) -> None:
    """The measurement ends with 0 at the moment at which the engine ends."""
    engine = job.engine()
    mark = job.folder / "go"
    wait = f"while [ ! -e {mark} ]; do sleep 0.01; done"
    bench = job.bench(f"sh -c '{wait}'")
    said(bench, "canary: ")
    ENDS[end](engine)
    mark.touch()
    assert ended(bench)[0] in (5, 7)


def test_an_engine_that_was_started_again_fails_the_job(job, said) -> None:
    engine = job.engine()
    bench = job.bench(f'{sys.executable} -c "{SLEEP}"')
    said(bench, "canary: ")
    kill_container(engine)
    job.engine()
    code, output = ended(bench)
    assert code == 7 and "started again" in output


def test_a_client_that_is_stopped_does_not_exit_with_0(job, said) -> None:
    job.engine()
    bench = job.bench(f'{sys.executable} -c "{SLEEP}"')
    said(bench, "canary: ")
    bench.terminate()
    assert ended(bench)[0] == 143


STOPPED_AT = {
    "as the measurement starts": """
import os, signal, subprocess
start = subprocess.Popen
def popen(*args, **kwargs):
    started = start(*args, **kwargs)
    os.kill(os.getpid(), signal.{number})
    return started
subprocess.Popen = popen""",
    "as soon as it runs": """
import os, signal
poll = bench.Engine.trouble
def trouble(engine):
    if os.path.exists(engine.folder / "measuring"):
        os.kill(os.getpid(), signal.{number})
    return poll(engine)
bench.Engine.trouble = trouble""",
}


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("moment", STOPPED_AT)
def test_a_stop_at_any_moment_leaves_no_measurement_behind(job, moment, number) -> None:
    """What is left behind would hold the pipe open that `ended` reads to its end."""
    job.engine()
    command = f"sh -c 'touch {job.folder}/measuring; exec sleep 600'"
    bench = job.bench(command, first=STOPPED_AT[moment].format(number=number))
    assert ended(bench)[0] == 143


def test_what_an_earlier_job_left_does_not_count(job) -> None:
    for name in ("alive", "ended", "log"):
        (job.folder / name).write_text("of an earlier job")
    os.utime(job.folder / "alive", (0, 0))
    bench = job.bench()
    time.sleep(1)
    job.engine()
    assert ended(bench)[0] == 0


def test_an_engine_that_refuses_fails_the_job(job) -> None:
    job.engine(VLLM_API_KEY="another")
    assert ended(job.bench(limit_s=3))[0] == 4


def running(url: str) -> float:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as reply:
            return float(reply.read().split()[1])
    except OSError:
        return -1.0
