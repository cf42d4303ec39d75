"""`ray_node.py` with a program called `ray` that does what each test says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ray_node

DOCKER = Path(__file__).parents[2] / "docker"
KEY = "planted-key-of-the-api"
RAY = """#!/bin/sh
echo $$ >> "$FOLDER/ray.pids"
env > "$FOLDER/ray.env"
echo "$@" > "$FOLDER/ray.argv"
trap 'echo ray >> "$FOLDER/ends"; exit 0' TERM
[ "$(wc -l < "$FOLDER/ray.pids")" -gt "${RAY_FAILS:-0}" ] || exit 1
echo 'INFO -- Ray runtime started.'
while [ ! -e "$FOLDER/break" ]; do sleep 0.05; done
exit 3
"""
ENGINE = """
import os, signal, sys, time
def ended(*_):
    open(os.environ["FOLDER"] + "/ends", "a").write("engine\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
folder = os.environ["FOLDER"]
open(folder + "/engine.env", "w").write("\\n".join(f"{k}={v}" for k, v in os.environ.items()))
open(folder + "/engine.pid", "w").write(str(os.getpid()))
while not os.path.exists(folder + "/crash"):
    time.sleep(0.05)
sys.exit(5)
"""


def environment(rank: int = 0, **more: str) -> dict[str, str]:
    return {
        "GLM_EXL3_RAY_PORT": "29530", "GLM_EXL3_NODE_RANK": str(rank), "GLM_EXL3_HEAD": "10.0.0.1",
        "GLM_EXL3_GENERATION": "g1", "GLM_EXL3_RAY_GPUS": "2", "VLLM_HOST_IP": f"10.0.0.{rank + 1}",
    } | more  # fmt: skip


def argv_of(rank: int = 0, **more: str) -> list[str]:
    return ray_node.ray_argv(ray_node.read_settings(environment(rank, **more)))


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_the_head_begins_a_cluster_and_the_others_join_it() -> None:
    head, worker = argv_of(0), argv_of(1)
    assert "--head" in head and option(head, "--port") == "29530" and "--address" not in head
    assert "--head" not in worker and option(worker, "--address") == "10.0.0.1:29530"
    for argv, ip in ((head, "10.0.0.1"), (worker, "10.0.0.2")):
        assert option(argv, "--node-ip-address") == ip and option(argv, "--num-gpus") == "2"
        assert json.loads(option(argv, "--resources")) == {"glm_exl3_g1": 2}


def test_all_nodes_join_a_cluster_that_is_there() -> None:
    for rank in (0, 1):
        argv = argv_of(rank, GLM_EXL3_RAY_ADDRESS="10.9.9.9:6379")
        assert "--head" not in argv and option(argv, "--address") == "10.9.9.9:6379"


def test_an_address_of_ipv6_is_put_in_brackets() -> None:
    assert option(argv_of(1, GLM_EXL3_HEAD="fd00::1"), "--address") == "[fd00::1]:29530"


@given(first=st.integers(1024, 65535 - ray_node.PORTS + 1), rank=st.integers(0, 3))
def test_every_port_lies_in_the_block_and_none_is_given_twice(first: int, rank: int) -> None:
    argv = argv_of(rank, GLM_EXL3_RAY_PORT=str(first))
    named = {flag: int(value) for flag, value in zip(argv, argv[1:], strict=False)
             if flag.endswith("port")}  # fmt: skip
    low, high = named.pop("--min-worker-port"), named.pop("--max-worker-port")
    assert len(set(named.values())) == len(named) and max(named.values()) < low
    assert first <= min(named.values()) and low < high == first + ray_node.PORTS - 1


@dataclass
class Machine:
    """Starts `ray_node.py` beside a fake `ray` and a fake engine."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, rank: int = 0, **more: str) -> subprocess.Popen[str]:
        env = {"PATH": f"{self.folder}:{os.environ['PATH']}", "FOLDER": str(self.folder)}
        process = subprocess.Popen(
            [sys.executable, str(DOCKER / "ray_node.py"), sys.executable, "-c", ENGINE],
            env=environment(rank) | env | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def read(self, name: str) -> str:
        file = self.folder / name
        return file.read_text() if file.exists() else ""

    def until(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not what():
            assert time.monotonic() < deadline, "not within 20 s"
            time.sleep(0.02)

    def left(self) -> list[int]:
        pids = [int(one) for one in self.read("ray.pids").split() + self.read("engine.pid").split()]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    (tmp_path / "ray").write_text(RAY)
    (tmp_path / "ray").chmod(0o755)
    machine = Machine(tmp_path)
    yield machine
    for process in machine.started:
        process.kill()
    for pid in machine.left():
        os.kill(pid, signal.SIGKILL)
    for process in machine.started:
        process.communicate()


def test_asked_to_stop_the_engine_drains_before_ray_goes(machine) -> None:
    node = machine.start(VLLM_API_KEY=KEY)
    machine.until(lambda: machine.read("engine.pid"))
    node.terminate()
    said, _ = node.communicate(timeout=20)
    assert node.returncode == 0 and "error" not in said
    assert machine.read("ends").split() == ["engine", "ray"] and machine.left() == []


def test_the_engine_knows_the_cluster_and_ray_knows_no_key(machine) -> None:
    machine.start(VLLM_API_KEY=KEY)
    machine.until(lambda: machine.read("engine.pid"))
    engine = machine.read("engine.env").splitlines()
    assert f"VLLM_API_KEY={KEY}" in engine and "RAY_ADDRESS=10.0.0.1:29530" in engine
    assert "GLM_EXL3_RAY_RESOURCE=glm_exl3_g1" in engine
    assert KEY not in machine.read("ray.env") + machine.read("ray.argv")
    assert "RAY_worker_niceness=0" in machine.read("ray.env").splitlines()


@pytest.mark.parametrize(("file", "code"), [("crash", 5), ("break", ray_node.EXIT_RAY_ENDED)])
def test_when_one_ends_the_other_is_gone_too(machine, file: str, code: int) -> None:
    node = machine.start()
    machine.until(lambda: machine.read("engine.pid"))
    (machine.folder / file).touch()
    said, _ = node.communicate(timeout=20)
    assert node.returncode == code and machine.left() == []
    assert ("Ray's processes on this node ended with 3" in said) == (file == "break")


def test_a_ray_that_gave_up_is_started_again(machine) -> None:
    node = machine.start(RAY_FAILS="2")
    machine.until(lambda: machine.read("engine.pid"))
    assert len(machine.read("ray.pids").split()) == 3
    node.terminate()
    assert "attempt 2 of 4" in node.communicate(timeout=20)[0]


def test_a_ray_that_never_starts_ends_the_node_without_an_engine(machine) -> None:
    node = machine.start(RAY_FAILS="9")
    said, _ = node.communicate(timeout=20)
    assert node.returncode == ray_node.EXIT_RAY_ENDED and not machine.read("engine.pid")
    assert "error: Ray does not start at 10.0.0.1:29531" in said


def test_a_worker_waits_for_the_head_and_runs_no_engine(machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        node = machine.start(1, GLM_EXL3_RAY_ADDRESS=f"127.0.0.1:{port}")
        machine.until(lambda: machine.read("ray.argv"))
        time.sleep(0.5)
        assert node.poll() is None and not machine.read("engine.pid")
        node.terminate()
        node.communicate(timeout=20)
    assert node.returncode == 0 and machine.left() == []


def test_a_worker_whose_cluster_went_away_soon_joins_the_next(machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        node = machine.start(1, GLM_EXL3_RAY_ADDRESS=f"127.0.0.1:{port}")
        for joined in range(1, ray_node.STARTS + 1):
            machine.until(lambda n=joined: len(machine.read("ray.pids").split()) == n)
            os.kill(int(machine.read("ray.pids").split()[-1]), signal.SIGKILL)
        said, _ = node.communicate(timeout=20)
    assert node.returncode == ray_node.EXIT_RAY_ENDED and machine.left() == []
    assert said.count("so this node joins it again") + said.count("did not start") >= 3


def test_a_cluster_that_never_answers_is_named(monkeypatch, capfd) -> None:
    monkeypatch.setattr(ray_node, "JOIN_S", 0.3)
    settings = ray_node.read_settings(environment(1, GLM_EXL3_RAY_ADDRESS="127.0.0.1:1"))
    node = ray_node.RayNode(settings, ["false"], {})
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert node.run() == ray_node.EXIT_RAY_ENDED
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
    assert "no Ray cluster answers at 127.0.0.1:1 after 0.3 s" in capfd.readouterr().err


def test_an_image_without_ray_says_what_to_do(capfd) -> None:
    assert ray_node.main(["vllm"], environment(PATH="/nonexistent")) == ray_node.EXIT_NO_RAY
    assert "this image has no Ray" in capfd.readouterr().err
    assert ray_node.main(["vllm"], {"GLM_EXL3_RAY_PORT": "x"}) == ray_node.EXIT_NO_RAY
