"""Order, rollback and stop of a cluster, with a runner that starts nothing."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path

import pytest

from glm_launch import health, lifecycle, ports, procs
from glm_launch.errors import (
    Finding,
    InterruptedLaunchError,
    LaunchFailedError,
    RefusedError,
    UnhealthyError,
)
from glm_launch.lifecycle import Cluster
from glm_launch.plan import LaunchPlan
from glm_launch.state import StateStore

ORDER = [("start", 1), ("start", 0)]
ROLLBACK = [("stop", 0), ("stop", 1)]


@pytest.fixture
def cluster(tmp_path: Path, fake_runner) -> Cluster:
    store = StateStore(tmp_path / "state")
    store.folder.mkdir()
    return Cluster(store, fake_runner)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the canary gives, one after the other; an exception is raised."""
    prepared: list[object] = []

    def complete(*_: object) -> object:
        value = prepared.pop(0)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(ports, "accepts", lambda _host, _port: bool(prepared))
    monkeypatch.setattr(health, "complete", complete)
    monkeypatch.setattr(health, "POLL_S", 0.001)
    return prepared


def launch(cluster: Cluster, plan: LaunchPlan):
    return cluster.launch(plan, {}, lambda _name, _at: None)


def test_workers_start_first_and_ready_comes_after_an_answer(cluster, plan, answers) -> None:
    answers += [None, " there"]
    current = launch(cluster, plan)
    assert cluster.runner.calls == ORDER
    assert answers == []
    assert (current.phase, cluster.store.current()) == ("ready", current)


def test_timings_are_remembered(cluster, plan, answers) -> None:
    answers.append("x")
    launch(cluster, plan)
    assert "READY" in cluster.store.timings(lifecycle.timings_key(plan))


def test_a_rank_that_cannot_start_rolls_back(cluster, plan) -> None:
    cluster.runner.fail_at = 0
    with pytest.raises(OSError, match="no such program"):
        launch(cluster, plan)
    assert cluster.runner.calls == ORDER + ROLLBACK
    assert cluster.store.current() is None


@pytest.mark.parametrize("state", ["exited", "orphaned", "lost", "absent"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_rolls_back(cluster, plan, answers, rank: int, state: str) -> None:
    cluster.runner.states[rank] = state
    with pytest.raises(LaunchFailedError) as caught:
        launch(cluster, plan)
    assert f"rank {rank}" in caught.value.findings[0].seen
    assert cluster.runner.calls == ORDER + ROLLBACK
    assert cluster.store.current() is None


def test_an_error_from_the_canary_rolls_back(cluster, plan, answers) -> None:
    answers.append(LaunchFailedError(Finding("canary-failed", "HTTP 500", "", "")))
    with pytest.raises(LaunchFailedError, match="HTTP 500"):
        launch(cluster, plan)
    assert cluster.runner.calls[-2:] == ROLLBACK


def test_running_out_of_time_rolls_back(cluster, plan, answers) -> None:
    with pytest.raises(LaunchFailedError, match="no answer after 0 s"):
        launch(cluster, dataclasses.replace(plan, ready_timeout_s=0))
    assert cluster.runner.calls[-2:] == ROLLBACK


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_ready_rolls_back(cluster, plan, answers, number: signal.Signals) -> None:
    timer = threading.Timer(0.1, os.kill, (os.getpid(), number))
    timer.start()
    with pytest.raises(InterruptedLaunchError, match=number.name):
        launch(cluster, plan)
    timer.join()
    assert cluster.runner.calls[-2:] == ROLLBACK
    assert cluster.store.current() is None


def test_a_second_signal_does_not_cut_the_rollback(cluster, plan, answers, monkeypatch) -> None:
    stop = cluster.runner.stop

    def stop_and_signal(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        stop(*arguments)

    monkeypatch.setattr(cluster.runner, "stop", stop_and_signal)
    cluster.runner.states[1] = "exited"
    with pytest.raises(LaunchFailedError):
        launch(cluster, plan)
    assert cluster.runner.calls[-2:] == ROLLBACK


def test_stop_is_idempotent_and_ends_the_head_first(cluster, plan) -> None:
    cluster.start(plan)
    assert cluster.stop() is True
    assert cluster.stop() is False
    assert cluster.runner.calls == ORDER + ROLLBACK
    assert cluster.observe() == []


def test_a_second_launch_is_refused(cluster, plan) -> None:
    cluster.store.mark(cluster.start(plan), "ready")
    assert cluster.clean_up() is False
    with pytest.raises(RefusedError, match="restart replaces it"):
        cluster.refuse_second()


@pytest.mark.parametrize("phase", ["starting", "stopping"])
def test_an_abandoned_launch_is_cleaned_up(cluster, plan, phase: str) -> None:
    cluster.store.mark(cluster.start(plan), phase)
    assert cluster.clean_up() is True
    assert cluster.runner.calls == ORDER + ROLLBACK


def test_a_launch_whose_ranks_are_gone_is_cleaned_up(cluster, plan) -> None:
    cluster.store.mark(cluster.start(plan), "ready")
    cluster.runner.states |= {0: "lost", 1: "exited"}
    assert cluster.clean_up() is True


def test_a_half_dead_launch_is_not_cleaned_up_silently(cluster, plan) -> None:
    cluster.store.mark(cluster.start(plan), "ready")
    cluster.runner.states[1] = "exited"
    assert cluster.clean_up() is False


def test_ranks_whose_demo_was_killed_are_cleaned_up(cluster, plan) -> None:
    current = cluster.store.mark(cluster.start(plan, owned=True), "ready")
    assert cluster.clean_up() is False
    gone = procs.Identity(current.launcher.pid, current.launcher.start_ticks + 1, "other boot")
    cluster.store._save(dataclasses.replace(current, launcher=gone))
    assert cluster.clean_up() is True


def test_unhealthy_names_the_rank_and_the_missing_answer(cluster, plan) -> None:
    current = cluster.start(plan)
    with pytest.raises(UnhealthyError, match="does not answer: timed out"):
        lifecycle.raise_if_unhealthy(
            current, cluster.observe(), {"answered": False, "error": "timed out"}
        )
    cluster.runner.states[1] = "exited"
    with pytest.raises(UnhealthyError, match=r"rank 1 \(worker\) exited"):
        lifecycle.raise_if_unhealthy(current, cluster.observe(), {"answered": True})


def test_a_worker_gets_less_time_to_end_than_the_head(plan) -> None:
    patient = dataclasses.replace(plan, stop_grace_s=600)
    assert [lifecycle.grace_of(patient, rank) for rank in patient.ranks] == [600, 2]


def test_stop_goes_on_after_a_rank_that_cannot_be_stopped(cluster, plan, monkeypatch) -> None:
    cluster.start(plan)
    stop = cluster.runner.stop

    def broken(rank, *rest: object) -> None:
        stop(rank, *rest)
        if rank.rank == 0:
            raise LaunchFailedError(Finding("ssh-timeout", "nothing answers", "", "check it"))

    monkeypatch.setattr(cluster.runner, "stop", broken)
    with pytest.raises(LaunchFailedError, match="rank 0 on 127.0.0.1 could not be stopped"):
        cluster.stop()
    assert cluster.runner.calls[-2:] == ROLLBACK
    current = cluster.store.current()
    assert current is not None and current.phase == "stopping"
    monkeypatch.setattr(cluster.runner, "stop", stop)
    assert cluster.stop() is True and cluster.store.current() is None


def test_a_guard_ends_the_launch_and_both_troubles_are_told(cluster, plan, monkeypatch) -> None:
    def guard() -> None:
        raise LaunchFailedError(Finding("memory-floor", "5 GiB left", "", ""))

    def broken(*_: object) -> None:
        raise LaunchFailedError(Finding("ssh-timeout", "nothing answers", "", ""))

    monkeypatch.setattr(cluster.runner, "stop", broken)
    with pytest.raises(LaunchFailedError) as caught:
        cluster.launch(plan, {}, lambda _name, _at: None, guard=guard)
    assert [finding.code for finding in caught.value.findings] == [
        "memory-floor", "ssh-timeout", "ssh-timeout",
    ]  # fmt: skip
