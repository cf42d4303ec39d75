"""The supervisor's loop: look, decide, act; and how it begins and ends.

What must stay true: it acts only while it holds the launcher's own lock, so no command is ever
disturbed; SIGTERM ends it at once, rolling back a restart that is under way, and leaves running
ranks alone; killed in any other way it leaves a state that the next one goes on from; a disk
that is full does not end it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from glm_launch import signals
from glm_launch.errors import Finding, InterruptedLaunchError, LaunchError, RefusedError
from glm_launch.lifecycle import Cluster
from glm_launch.nodes.ssh import Shell
from glm_launch.plan import LaunchPlan
from glm_launch.session import Guard
from glm_launch.state import Current
from glm_launch.supervise import core, desk
from glm_launch.supervise.core import Action, End, Mind, StartAll, StopAll, Tell
from glm_launch.supervise.desk import Desk, Saved
from glm_launch.supervise.eyes import Eyes, shells_of
from glm_launch.supervise.signs import Outcome, Signs
from glm_launch.supervise.troubles import Rules, Trouble

TICK_S = 0.5
UNFINISHED = ("stopping", "waiting", "pausing", "starting")


@dataclass
class Watchman:
    """Looks after the launch of one state folder.

    `changing` gives the right to change nodes, `guarding` watches their memory while they load.
    """

    cluster: Cluster
    secrets: Mapping[str, str]
    rules: Rules = Rules()
    shells: Callable[[LaunchPlan], Mapping[str, Shell]] = shells_of
    changing: Callable[[], AbstractContextManager[Any]] = nullcontext
    guarding: Callable[[], AbstractContextManager[Guard | None]] = nullcontext
    clock: Callable[[], float] = time.monotonic
    desk: Desk = field(init=False)
    eyes: Eyes | None = None
    outcome: Outcome | None = None
    restarts_total: int = 0
    since: float = 0.0

    def __post_init__(self) -> None:
        self.desk = Desk(self.cluster.store.folder)
        self.cluster.say = self.desk.say

    def run(self) -> bool:
        """Watch until the launch is stopped by a command (True) or is given up (False).

        Raises `RefusedError` when there is nothing to look after, or somebody does already, and
        `InterruptedLaunchError` on SIGTERM.
        """
        with self.desk.hold():
            try:
                with signals.as_exceptions():
                    mind, plan = self.begin()
                    return self._watch(mind, plan)
            except InterruptedLaunchError:
                self.desk.say("ended by a signal; the ranks run on")
                raise
            finally:
                if self.eyes is not None:
                    self.eyes.close()

    def begin(self) -> tuple[Mind, LaunchPlan]:
        """Adopt the launch that runs, or go on where a supervisor before us ended."""
        current, saved, now = self.cluster.store.current(), self.desk.saved(), self.clock()
        self.since = time.time()
        starts: list[float] = []
        if saved is not None:
            self.restarts_total = saved.restarts_total
            starts = [start - time.time() + now for start in saved.starts]
        if current is not None and current.phase == "ready" and not current.owned:
            self.desk.say(f"watching {current.generation}")
            return core.adopt(current.generation, now, starts), current.plan
        if saved is not None and saved.phase in UNFINISHED and _is_ours(current, saved):
            trouble = saved.trouble or Trouble("abandoned", "a supervisor ended in a restart")
            self.desk.say(f"going on with the restart after: {trouble.text}")
            left = current.generation if current else None
            return core.resume(trouble, left, now, starts), saved.plan
        raise RefusedError(_nothing())

    def _watch(self, mind: Mind, plan: LaunchPlan) -> bool:
        self._look_at(plan, mind.generation or "-")
        self._save(mind, plan)
        while True:
            assert self.eyes is not None
            signs = self.eyes.signs(self.outcome)
            self.outcome = None
            before = mind
            mind, actions = core.step(mind, signs, self.rules)
            changed = replace(before, memory=mind.memory, at=mind.at) != mind
            if changed:
                self.restarts_total += len(mind.starts) > len(before.starts)
                self._save(mind, plan)
            for action in actions:
                end = self._do(action, mind, plan, signs)
                if end is not None:
                    return not end.down
            if not actions:
                time.sleep(TICK_S)

    def _do(self, action: Action, mind: Mind, plan: LaunchPlan, signs: Signs) -> End | None:
        if isinstance(action, Tell):
            self.desk.say(f"{action.level} [{action.code}] {action.text}")
        elif isinstance(action, StopAll):
            self.outcome = self.stop_all(mind, action.trouble, signs)
        elif isinstance(action, StartAll):
            self.outcome = self.start_all(plan)
            if self.outcome.ok and self.outcome.generation:
                self._look_at(plan, self.outcome.generation)
        else:
            return action
        return None

    def stop_all(self, mind: Mind, trouble: Trouble, signs: Signs) -> Outcome:
        """Archive what is known, then end every rank that can be reached."""
        store = self.cluster.store
        try:
            with store.lock("supervise"):
                current = store.current()
                found = current.generation if current else None
                if current is None or found != mind.generation:
                    return Outcome("stop", False, False, found)
                self._archive(current, trouble, signs)
                self.cluster.stop()
                return Outcome("stop", True, True, found)
        except InterruptedLaunchError:
            raise
        except (LaunchError, OSError) as error:
            return Outcome("stop", False, False, mind.generation, _seen(error))

    def start_all(self, plan: LaunchPlan) -> Outcome:
        """Start every rank and wait for an answer; a failed start is rolled back."""
        store = self.cluster.store
        try:
            with store.lock("supervise"), self.changing(), self.guarding() as memory:
                self.cluster.refuse_second()

                def guard() -> None:
                    for watch in (memory, self.eyes.links if self.eyes else None):
                        if watch is not None:
                            watch.check()

                current = self.cluster.launch(plan, self.secrets, self._phase, guard=guard)
                return Outcome("start", True, True, current.generation)
        except InterruptedLaunchError:
            raise
        except (LaunchError, OSError) as error:
            left = store.current()
            generation = left.generation if left else None
            return Outcome("start", False, left is None, generation, _seen(error))

    def _archive(self, current: Current, trouble: Trouble, signs: Signs) -> None:
        """Beside the logs: why the launch was ended, and what was seen then."""
        states = self.cluster.observe()
        value = {
            "trouble": asdict(trouble), "at": time.time(), "signs": asdict(signs),
            "ranks": [asdict(state) for state in states],
        }  # fmt: skip
        folder = self.cluster.store.launches / current.generation
        try:
            (folder / "end.json").write_text(json.dumps(value, indent=1))
        except OSError as error:
            self.desk.say(f"warning [not-archived] {error}")
        self.desk.say(f"logs of all ranks are in {folder}")

    def _phase(self, name: str, elapsed: float) -> None:
        self.desk.say(f"[{elapsed:6.1f} s] {name}")

    def _look_at(self, plan: LaunchPlan, generation: str) -> None:
        if self.eyes is not None:
            self.eyes.close()
        self.eyes = Eyes(
            plan, generation, self.cluster.store, self.cluster.runner, self.shells(plan),
            self.secrets.get("VLLM_API_KEY", ""), self.clock, self.desk.say,
        )  # fmt: skip
        self.eyes.start()

    def _save(self, mind: Mind, plan: LaunchPlan) -> None:
        try:
            self.desk.save(desk.saved_of(mind, plan, self.restarts_total, self.since))
        except OSError as error:
            self.desk.say(f"warning [not-saved] a supervisor after this one starts anew: {error}")


def _is_ours(current: Current | None, saved: Saved) -> bool:
    """Whether what is recorded is what the supervisor before us left behind.

    A start that was cut off has a name that nobody wrote down, but the same plan.
    """
    if current is None:
        return True
    return current.generation == saved.generation or (
        saved.phase == "starting" and current.plan.digest == saved.plan.digest
    )


def _seen(error: LaunchError | OSError) -> str:
    if isinstance(error, LaunchError):
        return "; ".join(finding.seen for finding in error.findings)
    return f"this machine refused: {error}"


def _nothing() -> Finding:
    return Finding(
        "nothing-runs",
        "no launch is READY here",
        "there is nothing to look after",
        "./start.sh start",
    )
