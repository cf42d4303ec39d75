"""Decides: signs in, actions out. Pure; the clock is part of the signs.

    watching -> stopping -> waiting -> pausing -> starting -> watching
                                  \\-> down (three restarts within half an hour did not help)

What must stay true, and is tested with random faults: ranks are only ever started when nothing of
an older launch is left and every node and link is there; at most `max_restarts` starts within any
`window_s`; nothing is restarted that makes progress; while another command is at work, or the
launch is no longer ours, nothing is done; every stop has a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from glm_launch.supervise import troubles
from glm_launch.supervise.signs import Outcome, Signs
from glm_launch.supervise.troubles import Memory, Rules, Trouble

Phase = Literal["watching", "stopping", "waiting", "pausing", "starting", "down", "done"]


@dataclass(frozen=True)
class Tell:
    """Something for the log: `code` is stable."""

    level: Literal["info", "warning", "error"]
    code: str
    text: str


@dataclass(frozen=True)
class StopAll:
    """Archive the logs of all ranks, then stop all of them."""

    trouble: Trouble


@dataclass(frozen=True)
class StartAll:
    """Start all ranks and wait for a real answer; `attempt` counts within the window."""

    attempt: int


@dataclass(frozen=True)
class End:
    """The supervisor's work is over; `down` when it gave up."""

    down: bool
    text: str


Action = Tell | StopAll | StartAll | End
Step = tuple["Mind", tuple[Action, ...]]


@dataclass(frozen=True)
class Mind:
    """What the supervisor knows; `starts` are the times of its own restarts.

    clean: nothing of an older launch is left. due: when the pause ends. ready_since: since when
    every node and link is there.
    """

    phase: Phase
    generation: str | None
    at: float
    starts: tuple[float, ...] = ()
    trouble: Trouble | None = None
    clean: bool = False
    due: float = 0.0
    ready_since: float | None = None
    waits_for: tuple[str, ...] = ()
    memory: Memory = Memory()


def adopt(generation: str, at: float, starts: Sequence[float] = ()) -> Mind:
    """Begin to watch a launch that is READY."""
    return Mind("watching", generation, at, tuple(starts))


def resume(
    trouble: Trouble, generation: str | None, at: float, starts: Sequence[float] = ()
) -> Mind:
    """Go on where a supervisor ended before its restart; `generation` is what it left behind."""
    return Mind("waiting", generation, at, tuple(starts), trouble, clean=generation is None)


def step(mind: Mind, signs: Signs, rules: Rules) -> Step:
    """What to do now, and what to remember."""
    handler = {
        "watching": _watch, "stopping": _stopping, "waiting": _waiting, "pausing": _pausing,
        "starting": _starting, "down": _rest, "done": _rest,
    }[mind.phase]  # fmt: skip
    after, actions = handler(mind, signs, rules)
    return replace(after, at=signs.at), actions


def _watch(mind: Mind, signs: Signs, rules: Rules) -> Step:
    if signs.busy:
        return replace(mind, memory=Memory()), ()
    if signs.generation != mind.generation:
        return _done(mind, "the launch was stopped or replaced by a command")
    memory, found, notes = troubles.judge(mind.memory, signs, signs.at - mind.at, rules)
    tells = tuple(Tell(note.level, note.code, note.text) for note in notes)
    mind = replace(mind, memory=memory)
    if found is None:
        return mind, tells
    after = replace(mind, phase="stopping", trouble=found, clean=False)
    return after, (*tells, Tell("error", found.code, found.text), StopAll(found))


def _stopping(mind: Mind, signs: Signs, rules: Rules) -> Step:
    outcome = signs.outcome
    if outcome is None or outcome.action != "stop":
        return mind, ()
    if outcome.generation != mind.generation:
        return _done(mind, "the launch was stopped or replaced by a command")
    return _wait(mind, signs, rules, outcome)


def _wait(mind: Mind, signs: Signs, rules: Rules, outcome: Outcome) -> Step:
    """After a stop or a failed start: on to waiting, saying what it still has to wait for."""
    after = replace(mind, phase="waiting", clean=outcome.clean, ready_since=None, waits_for=())
    tells = (Tell("warning", "not-stopped-everywhere", outcome.text),) if outcome.text else ()
    after, actions = _waiting(after, replace(signs, outcome=None), rules)
    return after, (*tells, *actions)


def _waiting(mind: Mind, signs: Signs, rules: Rules) -> Step:
    if signs.busy:
        return mind, ()
    if _changed(mind, signs):
        return _done(mind, "the launch was stopped or replaced by a command")
    missing = troubles.missing(signs)
    if missing:
        tell = Tell("warning", "waiting", f"waiting for {', '.join(missing)}")
        new = missing != mind.waits_for
        return replace(mind, ready_since=None, waits_for=missing), (tell,) if new else ()
    since = mind.ready_since if mind.ready_since is not None else signs.at
    mind = replace(mind, ready_since=since, waits_for=())
    if signs.at - since < rules.settle_s:
        return mind, ()
    assert mind.trouble is not None
    if not mind.clean:
        return replace(mind, phase="stopping"), (StopAll(mind.trouble),)
    return _pause(mind, signs, rules)


def _pause(mind: Mind, signs: Signs, rules: Rules) -> Step:
    recent = tuple(start for start in mind.starts if signs.at - start < rules.window_s)
    mind = replace(mind, starts=recent)
    assert mind.trouble is not None
    if len(recent) >= rules.max_restarts:
        text = (
            f"{len(recent)} restarts within {rules.window_s / 60:.0f} minutes did not help; "
            f"staying down. Last reason: {mind.trouble.text}"
        )
        return replace(mind, phase="down"), (Tell("error", "gave-up", text), End(True, text))
    delay = rules.delays_s[min(len(recent), len(rules.delays_s) - 1)]
    text = f"restart {len(recent) + 1} of {rules.max_restarts} in {delay:g} s"
    return replace(mind, phase="pausing", due=signs.at + delay), (Tell("info", "pause", text),)


def _pausing(mind: Mind, signs: Signs, rules: Rules) -> Step:
    if signs.busy:
        return mind, ()
    if _changed(mind, signs):
        return _done(mind, "the launch was stopped or replaced by a command")
    if troubles.missing(signs):
        return _waiting(replace(mind, phase="waiting", ready_since=None), signs, rules)
    if signs.at < mind.due:
        return mind, ()
    starts = (*mind.starts, signs.at)
    after = replace(mind, phase="starting", starts=starts)
    return after, (StartAll(len(starts)),)


def _starting(mind: Mind, signs: Signs, rules: Rules) -> Step:
    outcome = signs.outcome
    if outcome is None or outcome.action != "start":
        return mind, ()
    if not outcome.ok:
        trouble = Trouble("start-failed", f"the restart failed: {outcome.text}")
        mind = replace(mind, trouble=trouble, generation=outcome.generation)
        tell = Tell("error", trouble.code, trouble.text)
        after, actions = _wait(mind, signs, rules, replace(outcome, text=""))
        return after, (tell, *actions)
    after = replace(adopt(outcome.generation or "", signs.at), starts=mind.starts)
    return after, (Tell("info", "recovered", f"READY again as {outcome.generation}"),)


def _changed(mind: Mind, signs: Signs) -> bool:
    """Whether a command did something since our stop: what we left there is not there any more."""
    return signs.generation != (None if mind.clean else mind.generation)


def _rest(mind: Mind, _signs: Signs, _rules: Rules) -> Step:
    return mind, ()


def _done(mind: Mind, text: str) -> Step:
    return replace(mind, phase="done"), (Tell("info", "ended", text), End(False, text))
