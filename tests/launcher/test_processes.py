"""The command line with real processes: a fake engine, real signals, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from glm_launch import procs

TROUBLE = f"{sys.executable} {Path(__file__).with_name('fake_engine.py')} --trouble "


def status(launcher) -> dict:
    return json.loads(launcher("status", "--json").stdout)


def test_start_status_logs_stop(launcher) -> None:
    started = launcher("start")
    assert started.returncode == 0, started.stderr
    assert "READY" in started.stdout and "curl http://127.0.0.1" in started.stdout
    state = status(launcher)
    assert [rank["state"] for rank in state["ranks"]] == ["running", "running"]
    assert state["answer"]["answered"] is True
    assert "Application startup complete" in launcher("logs", "head").stdout
    assert launcher("status").returncode == 0
    assert launcher("stop").returncode == 0
    assert launcher.left_over() == []
    assert status(launcher) == {"phase": "stopped", "ranks": []}
    assert "Application startup complete" in launcher("logs", "head").stdout


def test_stop_without_a_launch_is_fine(launcher) -> None:
    done = launcher("stop")
    assert (done.returncode, done.stdout) == (0, "nothing runs\n")


def test_a_second_start_is_refused_and_restart_replaces(launcher) -> None:
    assert launcher("start").returncode == 0
    before = status(launcher)["generation"]
    second = launcher("start")
    assert second.returncode == 3 and "runs-already" in second.stderr
    assert launcher("restart").returncode == 0
    assert status(launcher)["generation"] != before
    launcher("stop")
    assert launcher.left_over() == []


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("head:crash", "rank 0 (head) exited with exit code 1"),
        ("worker:crash", "layer 3 has no scales"),
        ("worker:orphan", "rank 1 (worker) exited with exit code 3"),
        ("head:broken", "HTTP 500"),
    ],
)
def test_a_failed_launch_leaves_nothing(launcher, trouble: str, said: str) -> None:
    done = launcher("start", ENGINE_COMMAND=TROUBLE + trouble)
    assert done.returncode == 4
    assert said in done.stderr and "fix:" in done.stderr
    assert launcher.left_over() == []
    assert status(launcher)["phase"] == "stopped"


def test_an_engine_that_cannot_be_run_is_refused(launcher) -> None:
    done = launcher("start", ENGINE_COMMAND="/nonexistent/vllm")
    assert done.returncode == 3 and "no-engine" in done.stderr
    assert launcher.leaders() == []


def test_a_rank_that_ignores_the_request_to_stop_is_killed(launcher) -> None:
    options = {"ENGINE_COMMAND": TROUBLE + "worker:stubborn", "STOP_GRACE_S": "1"}
    assert launcher("start", **options).returncode == 0
    assert launcher("stop").returncode == 0
    assert launcher.left_over() == []


def test_a_rank_that_ended_makes_status_unhealthy(launcher, wait_for) -> None:
    launcher("start")
    os.kill(status(launcher)["ranks"][1]["pid"], signal.SIGKILL)
    wait_for(lambda: status(launcher)["ranks"][1]["state"] == "exited")
    done = launcher("status")
    assert done.returncode == 5
    assert "rank 1 (worker) exited with SIGKILL" in done.stderr
    assert launcher("status", "--json").returncode == 5


def test_a_killed_keeper_leaves_an_orphan_that_stop_ends(launcher) -> None:
    launcher("start")
    for leader in launcher.leaders():
        os.kill(leader.pid, signal.SIGKILL)
    assert {rank["state"] for rank in status(launcher)["ranks"]} == {"orphaned"}
    assert launcher.left_over()
    assert launcher("stop").returncode == 0
    assert launcher.left_over() == []


def test_a_launcher_killed_while_starting_is_cleaned_up_by_the_next(launcher, wait_for) -> None:
    first = launcher.popen("-m", "glm_launch", "start", ENGINE_COMMAND=TROUBLE + "head:silent")
    wait_for(lambda: len(launcher.leaders()) == 2)
    first.kill()
    first.wait()
    assert launcher.left_over()
    assert status(launcher)["answer"]["error"] == "abandoned while starting"
    second = launcher("start")
    assert second.returncode == 0, second.stderr
    assert "cleaning up" in second.stdout
    launcher("stop")
    assert launcher.left_over() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_start_rolls_back(launcher, wait_for, number: signal.Signals) -> None:
    first = launcher.popen("-m", "glm_launch", "start", ENGINE_COMMAND=TROUBLE + "head:silent")
    wait_for(lambda: len(launcher.leaders()) == 2)
    first.send_signal(number)
    output, _ = first.communicate(timeout=20)
    assert first.returncode == 130 and f"interrupted by {number.name}" in output
    assert launcher.left_over() == []


def test_a_command_refuses_while_another_is_at_work(launcher, wait_for) -> None:
    first = launcher.popen("-m", "glm_launch", "start", ENGINE_COMMAND=TROUBLE + "head:silent")
    wait_for(lambda: len(launcher.leaders()) == 2)
    for verb in ("start", "stop", "restart"):
        done = launcher(verb)
        assert done.returncode == 3 and "another command is at work: `start`" in done.stderr
    first.terminate()
    first.communicate(timeout=20)


def test_ports_in_use_are_refused_with_their_owner(launcher) -> None:
    with socket.socket() as api, socket.socket() as meeting:
        for taken, key in ((api, "PORT"), (meeting, "MASTER_PORT")):
            taken.bind(("127.0.0.1", int(launcher.env[key])))
            taken.listen()
        done = launcher("start")
    assert done.returncode == 3
    assert done.stderr.count("port-in-use") == 2
    assert f"pid {os.getpid()}" in done.stderr
    assert launcher.leaders() == []


def test_a_broken_checkpoint_is_refused_before_anything_starts(launcher, checkpoint) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"\x10")
    done = launcher("start")
    assert done.returncode == 3
    assert "model.safetensors" in done.stderr
    assert launcher.leaders() == []


def test_bad_settings_touch_nothing(launcher) -> None:
    done = launcher("start", RANKS="3", PORT="0")
    assert done.returncode == 2
    assert "RANKS=3" in done.stderr and "PORT=0" in done.stderr
    assert not launcher.state.exists()


def test_restart_with_a_broken_checkpoint_leaves_the_running_launch_alone(
    launcher, checkpoint
) -> None:
    launcher("start")
    (checkpoint / "model.safetensors").unlink()
    assert launcher("restart").returncode == 3
    assert status(launcher)["answer"]["answered"] is True
    launcher("stop")


def test_the_key_reaches_the_head_and_nothing_else(launcher) -> None:
    assert launcher("start", VLLM_API_KEY="planted-secret").returncode == 0
    with urlopen(f"http://127.0.0.1:{launcher.env['PORT']}/env") as reply:
        assert json.load(reply)["VLLM_API_KEY"] == "planted-secret"
    pids = launcher.left_over()
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    assert len(pids) == 4 and not any("planted-secret" in command for command in commands)
    worker = status(launcher)["ranks"][1]["pid"]
    assert "planted-secret" not in Path(f"/proc/{worker}/environ").read_text()
    outputs = [launcher(verb, VLLM_API_KEY="planted-secret").stdout for verb in ("plan", "status")]
    files = [path.read_text() for path in launcher.state.rglob("*") if path.is_file()]
    assert not any("planted-secret" in text for text in [*outputs, *files])
    launcher("stop")


def test_settings_of_the_launcher_do_not_leak_into_ranks(launcher) -> None:
    launcher("start", SPEC_METHOD="none", HOME="/tmp")
    with urlopen(f"http://127.0.0.1:{launcher.env['PORT']}/env") as reply:
        env = json.load(reply)
    assert not {"SPEC_METHOD", "MODEL", "ENGINE_COMMAND"} & set(env)
    assert env["HF_HUB_OFFLINE"] == env["VLLM_NO_USAGE_STATS"] == "1"
    launcher("stop")


def test_logs_follow_until_interrupted(launcher) -> None:
    launcher("start")
    follower = launcher.popen("-m", "glm_launch", "logs", "all", "-f")
    line = follower.stdout.readline()
    assert line.startswith("rank0: ")
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=10)
    assert follower.returncode == 130
    launcher("stop")


def test_doctor_lists_everything_that_would_refuse(launcher, checkpoint) -> None:
    fine = launcher("doctor")
    assert fine.returncode == 0 and "nothing would refuse" in fine.stdout
    (checkpoint / "config.json").unlink()
    bad = launcher("doctor", "--json", ENGINE_COMMAND="/nonexistent/vllm")
    assert bad.returncode == 3
    codes = {finding["code"] for finding in json.loads(bad.stdout)["findings"]}
    assert "no-engine" in codes and len(codes) == 2


def test_a_reused_pid_is_not_mistaken_for_a_rank() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as sleeper:
        real = procs.identify(sleeper.pid)
        assert real is not None and procs.session_members(real) == [sleeper.pid]
        older = procs.Identity(real.pid, real.start_ticks - 1, real.boot)
        other_boot = procs.Identity(real.pid, real.start_ticks, "another boot")
        for stranger in (older, other_boot):
            assert not procs.is_alive(stranger)
            procs.end_session(stranger, 0.1)
        assert procs.is_alive(real)
        procs.end_session(real, 1.0)
    assert not procs.is_alive(real)
