"""The state folder: locks, atomic writes, old launches."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from glm_launch import files
from glm_launch.errors import ExitCode, RefusedError
from glm_launch.plan import LaunchPlan
from glm_launch.state import KEPT_LAUNCHES, StateStore, new_generation
from glm_launch.supervise.desk import Desk

HOLDER = """
import os, sys, time
from pathlib import Path
from glm_launch.state import StateStore
from glm_launch.supervise.desk import Desk
folder = Path(sys.argv[1])
with StateStore(folder).lock("start"), Desk(folder).hold():
    if not os.fork():
        time.sleep(float(sys.argv[2]))
        os._exit(0)
    os.write(1, b"held")
    time.sleep(60)
"""


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


def killed_holder(folder: Path, for_s: float) -> None:
    """A holder of both locks, killed; for `for_s` its child did not yet become another program.

    Every program that Python starts is such a child for a moment, or longer on a busy machine.
    """
    command = [sys.executable, "-c", HOLDER, str(folder), str(for_s)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.read(4) == b"held"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()


def test_a_program_that_a_killed_holder_was_starting_refuses_nobody(store: StateStore) -> None:
    killed_holder(store.folder, 1.0)
    with store.lock("stop"), Desk(store.folder).hold():
        assert store.holder()["verb"] == "stop"
    killed_holder(store.folder, 1.0)
    assert not store.is_locked() and not Desk(store.folder).is_held()


def test_what_stays_locked_is_locked_whoever_took_it(store, monkeypatch) -> None:
    monkeypatch.setattr(files, "LEFT_S", 0.3)
    killed_holder(store.folder, 3.0)
    assert store.is_locked()
    with pytest.raises(RefusedError), store.lock("stop"):
        pass


def test_a_lock_that_is_given_back_is_free_at_once(store: StateStore) -> None:
    with store.lock("start"):
        mine = (store.folder / "lock").resolve()
        opened = [fd for fd in Path("/proc/self/fd").iterdir() if fd.resolve() == mine]
        copy = os.dup(int(opened[0].name))
    begin = time.monotonic()
    assert not store.is_locked() and time.monotonic() - begin < 1.0
    os.close(copy)


def test_a_living_holder_is_known_at_once(store: StateStore) -> None:
    with store.lock("start"):
        begin = time.monotonic()
        assert store.is_locked()
        with pytest.raises(RefusedError), store.lock("stop"):
            pass
        assert time.monotonic() - begin < 1.0


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
