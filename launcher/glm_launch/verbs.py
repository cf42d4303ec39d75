"""What each verb does, below the command line and above the parts. Returns the exit code."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from glm_launch import acceptance, health, logs
from glm_launch import plan as plan_module
from glm_launch.errors import ExitCode, Finding, RefusedError
from glm_launch.lifecycle import raise_if_unhealthy
from glm_launch.paths import ENV_EXAMPLE, REPOSITORY, env_file
from glm_launch.plan import LaunchPlan
from glm_launch.runner import NodeState
from glm_launch.session import Session, open_session
from glm_launch.state import Current
from glm_launch.supervise import hooks
from glm_launch.ui import Ui

TWO_AT_A_TIME = ("-n2", "--no-loadscope-reorder")


def start(ui: Ui, *, steal: bool = False, follow: bool = False) -> int:
    """Bring all ranks up and return once a completion came back; ranks stay.

    With `follow`, show what the supervisor says until it ends or Ctrl-C.
    """
    make_env_file(ui)
    session = open_session(ui)
    session.backend.require()
    hooks.step_aside(session.store)
    with session.lock("start"):
        session.cluster.clean_up()
        look_after(session)
        session.cluster.refuse_second()
        session.check()
        with session.backend.changing("start", steal=steal):
            plan = session.prepare()
            session.launch(plan)
    look_after(session)
    say_endpoint(ui, plan)
    if follow:
        hooks.follow(session.store, ui)
    return ExitCode.OK


def look_after(session: Session) -> None:
    """Leave a supervisor behind, unless SUPERVISE=0."""
    if session.settings.SUPERVISE:
        hooks.look_after(session.store, session.ui)


def restart(ui: Ui, *, steal: bool = False) -> int:
    """Check and bring everything, then stop and start."""
    make_env_file(ui)
    return replace_launch(open_session(ui), "restart", steal=steal)


def replace_launch(session: Session, verb: str, *, steal: bool = False) -> int:
    """Stop what runs once everything else is known to be in order, then start.

    What the running launch holds (ports, memory, GPUs) is judged after it ended.
    """
    session.backend.require()
    hooks.step_aside(session.store)
    with session.lock(verb):
        session.check(held=session.store.current() is not None)
        with session.backend.changing(verb, steal=steal):
            plan = session.prepare()
            hooks.dismiss(session.store)
            session.cluster.stop()
            session.check_freed()
            session.launch(plan)
    look_after(session)
    say_endpoint(session.ui, plan)
    return ExitCode.OK


def make_env_file(ui: Ui) -> None:
    """`.env` from the example when there is none: every line empty, nothing set by it."""
    path = env_file()
    if path.exists() or not ENV_EXAMPLE.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(ENV_EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    ui.line(f"made {path} from {ENV_EXAMPLE.name}; it is the place for your settings")


def stop(ui: Ui) -> int:
    """End all ranks; nothing to do is fine."""
    session = open_session(ui)
    hooks.dismiss(session.store)
    with session.store.lock("stop"):
        current = session.store.current()
        session.cluster.stop()
    if current is None:
        ui.line("nothing runs")
    else:
        unit = "process" if current.plan.runtime == "local" else "container"
        ui.line(f"stopped, no {unit} is left")
    return ExitCode.OK


def status(ui: Ui, *, as_json: bool) -> int:
    """Every rank, and whether the model answers; exit 5 when it should and does not."""
    session = open_session(ui)
    current, supervisor = session.store.current(), hooks.state_of(session.store)
    if current is None:
        text = f"nothing runs; {hooks.describe(supervisor)}" if supervisor else "nothing runs"
        more = {"supervisor": supervisor} if supervisor else {}
        emit(ui, {"phase": "stopped", "ranks": [], **more}, as_json, text)
        return ExitCode.UNHEALTHY if supervisor else ExitCode.OK
    states = session.cluster.observe()
    answer = _answer(session, current, states)
    drafts = None
    if answer["answered"]:
        drafts = acceptance.of_running(current.plan, session.settings.secrets())
    if as_json:
        found: dict[str, Any] = {
            "acceptance": drafts.as_json() if drafts else None,
            "supervisor": supervisor,
        }
        emit(ui, _status_json(current, states, answer) | found, True)
    else:
        _status_lines(ui, current, states, answer)
        if drafts is not None:
            ui.line(f"drafting {current.plan.drafting}: {drafts}")
        ui.line(f"supervisor: {hooks.describe(supervisor)}")
    if current.phase == "ready":
        if as_json and not answer.get("answered"):
            return ExitCode.UNHEALTHY
        raise_if_unhealthy(current, states, answer)
    return ExitCode.OK


def _answer(session: Session, current: Current, states: Sequence[NodeState]) -> dict[str, Any]:
    if current.phase != "ready":
        at_work = session.store.is_locked()
        error = current.phase if at_work else f"abandoned while {current.phase}"
        return {"answered": False, "error": error}
    if any(state.state != "running" for state in states):
        return {"answered": False, "error": "not every rank runs"}
    return health.probe(current.plan, session.settings.secrets())


def _status_json(
    current: Current, states: Sequence[NodeState], answer: dict[str, Any]
) -> dict[str, Any]:
    return {
        "phase": current.phase,
        "generation": current.generation,
        "model": current.plan.served_name,
        "endpoint": f"{current.plan.base_url}/v1",
        "drafting": current.plan.drafting,
        "edits": current.plan.edits,
        "digest": current.plan.digest,
        "ready_at": current.ready_at,
        "answer": answer,
        "ranks": [asdict(state) for state in states],
    }


def _status_lines(
    ui: Ui, current: Current, states: Sequence[NodeState], answer: dict[str, Any]
) -> None:
    ui.line(f"{current.plan.served_name} at {current.plan.base_url}/v1, {current.phase}")
    if current.plan.edits:
        ui.line(f"changed in memory: {current.plan.edits}")
    rows = [
        [state.rank, state.role, state.node, state.state, state.pid or "-", _uptime(state)]
        for state in states
    ]
    ui.table(["rank", "role", "node", "state", "pid", "up"], rows)
    said = f"in {answer['seconds']} s" if answer["answered"] else f"no: {answer['error']}"
    ui.line(f"answers: {said}")


def _uptime(state: NodeState) -> str:
    if state.started_at is None:
        return "-"
    seconds = int((state.ended_at or time.time()) - state.started_at)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def show_logs(ui: Ui, target: str, *, follow: bool, count: int, as_json: bool) -> int:
    """Print a rank's log, of the last launch when nothing runs."""
    session = open_session(ui)
    current = session.store.current()
    generation = current.generation if current else session.store.last_generation()
    if generation is None:
        raise RefusedError(
            Finding("no-logs", "there are no logs", "nothing was started yet", "./start.sh start")
        )
    folder = session.store.launches / generation
    ranks = plan_module.LaunchPlan.from_json(json.loads((folder / "plan.json").read_text())).ranks
    chosen = [rank for rank in ranks if target in (rank.role, str(rank.rank), rank.name, "all")]
    if not chosen:
        known = ", ".join(sorted({rank.role for rank in ranks} | {r.name for r in ranks}))
        raise RefusedError(
            Finding(
                "no-such-rank", f"no rank is called {target}", "it has no log", f"one of: {known}"
            )
        )
    files = {rank.name: folder / f"{rank.name}.log" for rank in chosen}
    fetch = session.cluster.observe if current else list
    if as_json:
        fetch()
        emit(ui, {name: health.last_lines(path, count) for name, path in files.items()}, True)
        return ExitCode.OK
    logs.show(ui, files, count, follow=follow, fetch=fetch)
    return ExitCode.OK


def show_plan(ui: Ui, *, as_json: bool) -> int:
    """Print what `start` would run, and change nothing."""
    session = open_session(ui)
    plan = session.backend.plan()
    steps = session.backend.steps(plan)
    if as_json:
        emit(ui, plan.as_json() | {"steps": [asdict(step) for step in steps]}, True)
        return ExitCode.OK
    ui.line(f"plan {plan.digest}: {plan.served_name} at {plan.base_url}/v1")
    for step in steps:
        ui.line(f"\n# {step.node}: {step.title}")
        into = f" \\\n| {shlex.join(step.into)}" if step.into else ""
        ui.line(shlex.join(step.argv) + into)
    for warning in plan.warnings:
        ui.warn(warning)
    return ExitCode.OK


TWO_AT_A_TIME = ("-n2", "--no-loadscope-reorder")


def test(arguments: Sequence[str]) -> int:
    """Run the test suite with these pytest arguments; replaces this process."""
    command = [sys.executable, "-m", "pytest", *test_arguments(arguments, dict(os.environ))]
    os.chdir(REPOSITORY)
    os.execv(command[0], command)  # noqa: S606 (argv list, no shell)


def test_arguments(arguments: Sequence[str], environ: dict[str, str]) -> list[str]:
    """Everything runs two files at a time, static checks in CI or with `--lint`; else pytest's."""
    lint = "--lint" in arguments or bool(environ.get("CI"))
    passed = [argument for argument in arguments if argument != "--lint"] or [*TWO_AT_A_TIME]
    return passed if lint else ["--ignore=tests/repository", *passed]


def bench(arguments: Sequence[str]) -> int:
    """`glm-bench` against the service of the settings, unless the arguments name another."""
    from glm_bench.cli import run

    session = open_session(Ui(out=sys.stderr))
    environ = {**os.environ, **session.settings.secrets()}
    return run([*arguments], base_url=f"{session.settings.base_url}/v1", environ=environ)


def say_endpoint(ui: Ui, plan: LaunchPlan) -> None:
    """The address and a line to try it with."""
    key = " -H 'Authorization: Bearer '\"$VLLM_API_KEY\"" if plan.ranks[0].secret_env else ""
    body = {
        "model": plan.served_name,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 64,
    }
    ui.line(f"endpoint  {plan.base_url}/v1   model {plan.served_name}")
    ui.line(f"try       curl {plan.base_url}/v1/chat/completions{key} "
            f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'")  # fmt: skip


def emit(ui: Ui, value: object, as_json: bool, text: str = "") -> None:
    """JSON for scripts, or a line for people."""
    ui.line(json.dumps(value, indent=2) if as_json else text)
