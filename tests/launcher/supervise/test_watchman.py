"""A machine that refuses to write or to look ends no supervisor, and hides no dead rank."""

from __future__ import annotations

import errno
import time
from dataclasses import replace

import pytest
from test_unit import OneContainer

from glm_launch.lifecycle import Cluster
from glm_launch.nodes.runner import ContainerRunner
from glm_launch.nodes.ssh import Done
from glm_launch.plan import RankPlan
from glm_launch.state import StateStore
from glm_launch.supervise import core, eyes
from glm_launch.supervise.signs import Signs
from glm_launch.supervise.troubles import Trouble
from glm_launch.supervise.watchman import Watchman

FULL = OSError(errno.ENOSPC, "No space left on device")
TROUBLE = Trouble("rank-ended", "rank 0 (head) exited with exit code 0")


def refuse(*_: object, **__: object) -> None:
    raise FULL


@pytest.fixture
def watchman(tmp_path, fake_runner) -> Watchman:
    watchman = Watchman(Cluster(StateStore(tmp_path / "state"), fake_runner), {})
    watchman.desk.folder.mkdir(parents=True)
    return watchman


def test_a_stop_that_cannot_archive_still_stops(watchman, plan, monkeypatch) -> None:
    current = watchman.cluster.start(plan, "g")
    monkeypatch.setattr(eyes.Eyes, "signs", lambda *_: None)
    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    watchman.cluster.store.mark = lambda current, _phase: current
    outcome = watchman.stop_all(
        core.adopt(current.generation, 0.0), TROUBLE, Signs(0.0, current.generation)
    )
    assert outcome.ok and outcome.clean
    assert watchman.cluster.store.current() is None


def test_a_stop_that_fails_on_this_machine_is_tried_again(watchman, plan) -> None:
    current = watchman.cluster.start(plan, "g")
    watchman.cluster.store.mark = refuse
    outcome = watchman.stop_all(core.adopt("g", 0.0), TROUBLE, Signs(0.0, "g"))
    assert (outcome.ok, outcome.clean, outcome.generation) == (False, False, current.generation)
    assert "No space left on device" in outcome.text


def test_a_start_that_fails_on_this_machine_is_a_failed_start(watchman, plan, fake_runner) -> None:
    fake_runner.fail_at = 0
    outcome = watchman.start_all(plan)
    assert (outcome.ok, outcome.clean, outcome.generation) == (False, True, None)
    assert "no such program" in outcome.text
    assert watchman.cluster.store.current() is None and ("stop", 1) in fake_runner.calls


def test_what_cannot_be_written_down_is_said(watchman, plan, monkeypatch) -> None:
    monkeypatch.setattr(type(watchman.desk), "save", refuse)
    watchman._save(core.adopt("g", 0.0), plan)
    assert "No space left on device" in watchman.desk.log.read_text()


def test_a_dead_rank_is_seen_whose_log_cannot_be_kept(tmp_path, monkeypatch) -> None:
    class Ended(OneContainer):
        def run(self, command: list[str], **more: object) -> Done:
            if command[1] in ("stop", "rm"):
                return Done(0, "", "")
            done = super().run(command, **more)
            return replace(done, out=done.out.replace('"running"', '"exited"'))

    monkeypatch.setattr("pathlib.Path.touch", refuse)
    runner = ContainerRunner(tmp_path, {"n0": Ended()}, {})
    rank = RankPlan(0, "head", "n0", (), ())
    assert runner.observe(rank, "new").state == "exited"
    runner.stop(rank, "new", 1.0)


def test_a_look_that_fails_is_unknown_told_once_and_tried_again(
    tmp_path, plan, fake_runner, wait_for, monkeypatch
) -> None:
    monkeypatch.setattr(eyes, "RANK_S", 0.02)
    fake_runner.states = {0: "running", 1: "running"}
    said: list[str] = []
    looking = eyes.Eyes(plan, "g", StateStore(tmp_path), fake_runner, {}, say=said.append)
    looking.start()
    try:
        observe = fake_runner.observe
        fake_runner.observe = lambda *_: [][0]
        wait_for(lambda: [rank.alive for rank in looking.ranks.values()] == [None, None])
        time.sleep(0.2)
        fake_runner.observe = observe
        wait_for(lambda: all(rank.alive for rank in looking.ranks.values()))
    finally:
        looking.close()
    assert len(said) == 2 and all("IndexError" in text for text in said)
