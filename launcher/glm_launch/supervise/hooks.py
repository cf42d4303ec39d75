"""What the verbs do about the supervisor: end it before they change a launch, start it afterwards.

What must stay true: no verb works against a living supervisor; what is READY when a verb ends is
looked after, unless SUPERVISE=0 or a demo owns it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from glm_launch import procs
from glm_launch.paths import REPOSITORY
from glm_launch.state import Current, StateStore
from glm_launch.supervise.desk import Desk
from glm_launch.supervise.watchman import UNFINISHED
from glm_launch.ui import Ui

BEGIN_S = 20.0
FOLLOW_S = 0.3


def step_aside(store: StateStore) -> None:
    """End a supervisor that is between its stop and its start: a command takes over."""
    current = store.current()
    if current is None or current.phase != "ready":
        Desk(store.folder).dismiss()


def dismiss(store: StateStore) -> None:
    """End the supervisor; what runs is left alone."""
    Desk(store.folder).dismiss()


def look_after(store: StateStore, ui: Ui) -> None:
    """Start the supervisor of what is READY, in a session of its own; never fails a launch."""
    desk, current = Desk(store.folder), store.current()
    if current is None or current.phase != "ready" or current.owned or is_watching(desk, current):
        return
    desk.dismiss()
    desk.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with desk.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "glm_launch.supervise"], cwd=REPOSITORY, env=os.environ,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    watching = procs.wait_until(
        lambda: is_watching(desk, current) or process.poll() is not None, BEGIN_S
    )
    if watching and process.poll() is None:
        ui.line(f"supervised by process {process.pid}, log {desk.log}")
    else:
        ui.warn(f"nobody looks after this launch; {desk.log} says why")


def is_watching(desk: Desk, current: Current) -> bool:
    """Whether a living supervisor looks after exactly this launch."""
    saved = desk.saved()
    return saved is not None and saved.generation == current.generation and desk.is_held()


def state_of(store: StateStore) -> dict[str, Any] | None:
    """The supervisor for `status`; None when there neither is one nor was one that gave up."""
    desk = Desk(store.folder)
    saved, alive = desk.saved(), desk.is_held()
    if saved is None:
        return {"alive": alive, "phase": "unknown"} if alive else None
    return {
        "alive": alive,
        "phase": saved.phase,
        "pid": saved.identity.pid if alive else None,
        "restarts": saved.restarts_total,
        "reason": saved.trouble.text if saved.trouble else None,
        "waits_for": list(saved.waits_for),
        "log": str(desk.log),
    }


def describe(state: dict[str, Any] | None) -> str:
    """The same in one line."""
    if state is None or (not state["alive"] and state["phase"] not in (*UNFINISHED, "down")):
        return (
            "unsupervised: nobody restarts it (./start.sh restart, or the next start, changes that)"
        )
    if state["phase"] == "down":
        return f"down: {state['reason']}"
    reason = f" after: {state['reason']}" if state.get("reason") else ""
    waits = f", waiting for {', '.join(state['waits_for'])}" if state.get("waits_for") else ""
    gone = "" if state["alive"] else "; its supervisor is gone, ./start.sh start takes over"
    return f"{state['phase']}{waits}, {state.get('restarts', 0)} restart(s){reason}{gone}"


def follow(store: StateStore, ui: Ui) -> None:
    """Show what the supervisor says until it ends; Ctrl-C only stops showing."""
    from glm_launch.health import LogWatch

    desk = Desk(store.folder)
    watch = LogWatch([desk.log])
    watch.new_lines(desk.log)
    try:
        ui.line("following the supervisor; Ctrl-C detaches, the launch runs on")
        while desk.is_held():
            for line in watch.new_lines(desk.log):
                ui.line(line)
            time.sleep(FOLLOW_S)
    except KeyboardInterrupt:
        ui.line("detached; ./start.sh status shows the launch")
