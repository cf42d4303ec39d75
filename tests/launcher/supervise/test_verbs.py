"""The verbs and the supervisor: who starts it, who ends it, what status says."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm_launch import procs
from glm_launch.procs import Identity
from glm_launch.state import StateStore
from glm_launch.supervise import hooks
from glm_launch.supervise.desk import Desk

pytestmark = pytest.mark.slow
RANK = Path(__file__).parents[2] / "lab" / "fakerank.py"


@pytest.fixture
def supervised(launcher) -> Iterator[object]:
    launcher.env |= {"SUPERVISE": "1", "ENGINE_COMMAND": f"{sys.executable} {RANK}"}
    yield launcher
    assert launcher("stop").returncode == 0
    assert launcher.left_over() == [] and not Desk(launcher.state).is_held()


def supervisor(launcher) -> Identity:
    return Desk(launcher.state).saved().identity


def status(launcher) -> dict:
    return json.loads(launcher("status", "--json").stdout)


def test_start_leaves_a_supervisor_and_stop_ends_it(supervised, wait_for) -> None:
    started = supervised("start")
    assert started.returncode == 0 and "supervised by process" in started.stdout
    first = supervisor(supervised)
    assert procs.is_alive(first) and os.getsid(first.pid) == first.pid
    assert "supervisor: watching, 0 restart(s)" in supervised("status").stdout
    before = status(supervised)
    os.kill(before["ranks"][1]["pid"], signal.SIGKILL)
    wait_for(
        lambda: (Desk(supervised.state).saved().generation or "") not in ("", before["generation"]),
        60.0,
    )
    after = status(supervised)
    assert after["answer"]["answered"] and after["supervisor"]["restarts"] == 1
    assert after["generation"] != before["generation"]
    assert supervised("stop").returncode == 0
    assert not procs.is_alive(first)
    assert status(supervised) == {"phase": "stopped", "ranks": []}


def test_a_dead_supervisor_is_told_and_start_adopts_without_a_restart(supervised, wait_for) -> None:
    supervised("start")
    first = supervisor(supervised)
    before = status(supervised)["generation"]
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: not procs.is_alive(first))
    assert "supervisor: unsupervised" in supervised("status").stdout
    again = supervised("start")
    assert again.returncode == 3 and "runs-already" in again.stderr
    assert "supervised by process" in again.stdout
    now = status(supervised)
    assert now["generation"] == before and now["supervisor"]["phase"] == "watching"


def test_restart_changes_the_launch_and_its_supervisor(supervised) -> None:
    supervised("start")
    first, before = supervisor(supervised), status(supervised)["generation"]
    assert supervised("restart").returncode == 0
    second = supervisor(supervised)
    assert second != first and not procs.is_alive(first) and procs.is_alive(second)
    now = status(supervised)
    assert now["generation"] != before and now["supervisor"]["phase"] == "watching"


def test_a_refused_restart_leaves_both_alone(supervised, checkpoint) -> None:
    supervised("start")
    first = supervisor(supervised)
    (checkpoint / "model.safetensors").unlink()
    assert supervised("restart").returncode == 3
    assert procs.is_alive(first) and status(supervised)["answer"]["answered"]


def test_what_was_given_up_is_down_until_the_next_start(supervised, wait_for) -> None:
    supervised("start", FAKE_TROUBLE="")
    desk = Desk(supervised.state)
    desk.dismiss()
    supervised.env["FAKE_TROUBLE"] = "crash-at-start"
    limits = json.dumps({"max_restarts": 0})
    drive = supervised.popen(str(Path(__file__).with_name("drive.py")), limits)
    wait_for(lambda: desk.saved() is not None and desk.is_held())
    os.kill(status(supervised)["ranks"][1]["pid"], signal.SIGKILL)
    assert drive.wait(30) == 5
    told = supervised("status")
    assert told.returncode == 5 and "down: rank 1 (worker) exited with SIGKILL" in told.stdout
    supervised.env["FAKE_TROUBLE"] = ""
    assert supervised("start").returncode == 0
    assert "supervisor: watching" in supervised("status").stdout


def test_follow_shows_the_log_and_ctrl_c_only_detaches(supervised) -> None:
    verb = supervised.popen("-m", "glm_launch", "start", "--follow")
    lines = []
    while "detaches" not in (line := verb.stdout.readline()):
        assert line, lines
        lines.append(line)
    verb.send_signal(signal.SIGINT)
    rest, _ = verb.communicate(timeout=20)
    assert verb.returncode == 0 and "detached" in rest
    assert status(supervised)["supervisor"]["phase"] == "watching"


def test_ctrl_c_with_the_first_line_only_detaches(tmp_path) -> None:
    said = []

    def line(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            raise KeyboardInterrupt

    hooks.follow(StateStore(tmp_path), SimpleNamespace(line=line))
    assert "detached" in said[-1]


def test_without_a_supervisor(supervised) -> None:
    assert "supervised by" not in supervised("start", SUPERVISE="0").stdout
    assert "supervisor: unsupervised" in supervised("status").stdout


def test_report_is_a_verb(supervised, tmp_path) -> None:
    done = supervised("report", "--folder", str(tmp_path))
    assert done.returncode == 0 and len(list(tmp_path.glob("glm-exl3-report-*.tar.gz"))) == 1
