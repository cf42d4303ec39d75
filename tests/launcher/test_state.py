"""The state folder: locks, atomic writes, old launches."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from glm_launch.errors import ExitCode, RefusedError
from glm_launch.plan import LaunchPlan
from glm_launch.state import KEPT_LAUNCHES, StateStore, new_generation


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    folder = tmp_path / "state"
    folder.mkdir()
    return StateStore(folder)


def test_the_lock_refuses_a_second_command_and_names_the_first(store: StateStore) -> None:
    with store.lock("start"):
        assert store.is_locked()
        with pytest.raises(RefusedError, match=rf"`start` \(pid {os.getpid()}\)") as caught:
            with StateStore(store.folder).lock("stop"):
                pass
        assert caught.value.exit_code == ExitCode.REFUSED
    assert not store.is_locked()
    with store.lock("stop"):
        pass


def test_one_who_only_looks_refuses_nobody(store: StateStore) -> None:
    with store.lock("start"):
        pass
    with (store.folder / "lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.3, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with store.lock("stop"):
            assert store.holder()["verb"] == "stop"
    with store.lock("start"), pytest.raises(RefusedError), store.lock("stop"):
        pass


def test_nothing_is_locked_before_the_first_command(store: StateStore) -> None:
    assert not store.is_locked()
    assert store.current() is None
    assert store.last_generation() is None


def test_the_current_launch_reads_back(store: StateStore, plan: LaunchPlan) -> None:
    current = store.begin(plan, new_generation(), owned=True)
    assert store.current() == current
    ready = store.mark(current, "ready")
    assert store.current() == ready and ready.ready_at is not None
    store.forget()
    store.forget()
    assert store.current() is None
    assert store.last_generation() == current.generation


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_damaged_state_file_counts_as_none(store: StateStore, content: str) -> None:
    (store.folder / "cluster.json").write_text(content)
    assert store.current() is None


def test_old_launches_are_dropped(store: StateStore, plan: LaunchPlan) -> None:
    for _ in range(KEPT_LAUNCHES + 3):
        last = store.begin(plan, new_generation(), owned=False)
    kept = [path.name for path in store.launches.iterdir()]
    assert len(kept) == KEPT_LAUNCHES and last.generation in kept


def test_timings_of_other_launches_stay(store: StateStore) -> None:
    store.keep_timings("a", {"READY": 1.0})
    store.keep_timings("b", {"READY": 2.0})
    assert store.timings("a") == {"READY": 1.0}
    assert store.timings("c") == {}


def test_no_partial_file_is_left(store: StateStore, plan: LaunchPlan) -> None:
    store.begin(plan, new_generation(), owned=False)
    assert not list(store.folder.rglob("*.tmp"))
    assert json.loads((store.folder / "cluster.json").read_text())["phase"] == "starting"
