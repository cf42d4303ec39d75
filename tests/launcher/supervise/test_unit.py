"""The systemd unit, the counters, and how the supervisor's state is put into words."""

from __future__ import annotations

import configparser
import json
import subprocess
import time
from dataclasses import dataclass, replace

import pytest

from glm_launch.nodes import runner as runner_module
from glm_launch.nodes.runner import ContainerRunner
from glm_launch.nodes.ssh import Done
from glm_launch.plan import RankPlan
from glm_launch.runner import NodeState
from glm_launch.state import StateStore
from glm_launch.supervise import desk, eyes, hooks, unit
from glm_launch.supervise.core import Mind
from glm_launch.supervise.desk import Desk
from glm_launch.supervise.signs import EngineSign
from glm_launch.supervise.troubles import Trouble


def test_the_unit_starts_the_supervisor_and_respects_its_verdicts(tmp_path) -> None:
    text = unit.render("/x/.venv/bin/python", tmp_path)
    parsed = configparser.ConfigParser(delimiters="=", strict=False)
    parsed.optionxform = str
    parsed.read_string(text)
    service = parsed["Service"]
    assert service["ExecStart"] == "/x/.venv/bin/python -m glm_launch.supervise"
    assert service["WorkingDirectory"] == str(tmp_path)
    assert service["RestartPreventExitStatus"] == "2 3 5 130"
    assert parsed["Install"]["WantedBy"] == "default.target"


def test_counters_of_the_engine() -> None:
    text = (
        'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_running{engine="1"} 2.0\n'
        'vllm:iteration_tokens_total_count{engine="0"} 5.0\n# TYPE x counter\n'
    )
    assert eyes.counters(text) == EngineSign(3, 5)
    assert eyes.counters("nothing") is None


def test_compilers_count_below_the_ranks_and_nowhere_else(
    tmp_path, plan, fake_runner, monkeypatch
) -> None:
    asked: list[list[int]] = []

    def canary(_plan, _generation, _file, _key, roots) -> subprocess.Popen[bytes]:
        asked.append(roots)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(eyes, "_canary", canary)
    looking = eyes.Eyes(plan, "g", StateStore(tmp_path), fake_runner, {})
    head, worker = (NodeState(r.rank, r.role, r.node, "running") for r in plan.ranks)
    for states in ({}, {0: replace(head, pid=7)}, {0: replace(head, pid=7), 1: worker}):
        looking.states = states
        assert looking._health_of(plan.ranks[0]) == "" and asked == []
    looking.states = {0: replace(head, pid=7), 1: replace(worker, pid=8)}
    looking._health_of(plan.ranks[0])
    assert asked == [[7, 8]]
    looking.close()


@pytest.mark.parametrize("trouble", [None, Trouble("rank-ended", "rank 1 ended")])
def test_what_is_saved_comes_back(tmp_path, plan, trouble) -> None:
    folder = Desk(tmp_path)
    assert folder.saved() is None
    with folder.hold():
        mind = Mind("waiting", "g", 1000.0, (990.0,), trouble, waits_for=("n1",))
        saved = desk.saved_of(mind, plan, 3, time.time())
        folder.save(saved)
        assert folder.is_held()
    assert folder.saved() == saved and not folder.is_held()
    assert saved.starts[0] == pytest.approx(time.time() - 10, abs=2)
    (folder.folder / "state.json").write_text(json.dumps({"phase": "watching"}))
    assert folder.saved() is None


def test_a_long_log_loses_its_older_half(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(desk, "LOG_BYTES", 2000)
    folder = Desk(tmp_path)
    folder.folder.mkdir()
    for number in range(200):
        folder.say(f"line {number}")
    assert "line 199" in folder.log.read_text() and folder.log.stat().st_size < 3000


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "unsupervised"),
        ({"alive": False, "phase": "watching"}, "unsupervised"),
        ({"alive": True, "phase": "watching", "restarts": 2}, "watching, 2 restart(s)"),
        ({"alive": True, "phase": "waiting", "waits_for": ["n1"], "reason": "x"},
         "waiting, waiting for n1, 0 restart(s) after: x"),
        ({"alive": False, "phase": "pausing"}, "its supervisor is gone"),
        ({"alive": False, "phase": "down", "reason": "rank 1 ended"}, "down: rank 1 ended"),
    ],
)  # fmt: skip
def test_the_state_in_words(state, said) -> None:
    assert said in hooks.describe(state)


@dataclass
class OneContainer:
    """A node whose docker knows one running container of generation `new`."""

    name: str = "n0"

    def run(self, command: list[str], **_: object) -> Done:
        if command[:2] == ["docker", "inspect"]:
            labels = {"io.glm-exl3.generation": "new", "io.glm-exl3.project": "glm-exl3"}
            state = {"Status": "running", "Pid": 7}
            return Done(0, json.dumps([{"State": state, "Config": {"Labels": labels}}]), "")
        lines = ["line one\n", "line two\n"]
        return Done(0, "".join(lines)[int(command[-1].rpartition("+")[2]) - 1 :], "")


def test_a_look_at_the_old_launch_says_nothing_about_the_new(tmp_path) -> None:
    runner = ContainerRunner(tmp_path, {"n0": OneContainer()}, {})
    rank = RankPlan(0, "head", "n0", (), ())
    for generation in ("old", "new"):
        runner.log(rank, generation).parent.mkdir()
    assert runner.observe(rank, "old").state == "absent"
    assert runner.observe(rank, "new").state == "running"


def test_two_that_fetch_the_same_log_do_not_double_it(tmp_path) -> None:
    runner = ContainerRunner(tmp_path, {"n0": OneContainer()}, {})
    rank = RankPlan(0, "head", "n0", (), ())
    log = runner.log(rank, "new")
    log.parent.mkdir()
    log.write_text("line one\n")
    fetch = runner._fetch_log
    shell = runner.shells["n0"]

    class Late(OneContainer):
        def run(self, command: list[str], **more: object) -> Done:
            done = shell.run(command, **more)
            runner.shells = {"n0": shell}
            fetch(rank, "new")
            return done

    runner.shells = {"n0": Late()}
    fetch(rank, "new")
    assert log.read_text() == "line one\nline two\n"


def test_the_log_of_a_rank_that_runs_is_not_fetched_at_every_look(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runner_module, "LOOK_S", 0.0)
    rank = RankPlan(0, "head", "n0", (), ())
    for every_s, expected in ((60.0, 1), (0.0, 3)):
        runner = ContainerRunner(tmp_path, {"n0": OneContainer()}, {}, log_every_s=every_s)
        fetched: list[str] = []
        runner._fetch_log = lambda _rank, generation, known=fetched: known.append(generation)
        for _ in range(3):
            assert runner.observe(rank, "new").state == "running"
        assert len(fetched) == expected
