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

from glm_launch import health, logs, preflight
from glm_launch import plan as plan_module
from glm_launch.errors import ExitCode, Finding, LaunchError, RefusedError
from glm_launch.lifecycle import raise_if_unhealthy
from glm_launch.paths import REPOSITORY
from glm_launch.plan import LaunchPlan
from glm_launch.runner import NodeState
from glm_launch.session import Session, open_session
from glm_launch.state import Current
from glm_launch.ui import Ui


def start(ui: Ui) -> int:
    """Bring all ranks up and return once a completion came back; ranks stay."""
    session = open_session(ui)
    plan = session.plan()
    with session.store.lock("start"):
        session.cluster.clean_up()
        session.cluster.refuse_second()
        session.check(plan)
        session.launch(plan)
    say_endpoint(ui, plan)
    return ExitCode.OK


def restart(ui: Ui) -> int:
    """Check everything, then stop and start."""
    session = open_session(ui)
    plan = session.plan()
    with session.store.lock("restart"):
        refuse_before_touching(session, plan)
        session.cluster.stop()
        session.check(plan)
        session.launch(plan)
    say_endpoint(ui, plan)
    return ExitCode.OK


def refuse_before_touching(session: Session, plan: LaunchPlan) -> None:
    """All checks that do not depend on what the running launch holds (its ports, its memory)."""
    held = ("port-in-use", "too-little-memory")
    findings = preflight.check(session.settings, session.facts, plan)
    if serious := [finding for finding in findings if finding.code not in held]:
        raise RefusedError(*serious)


def stop(ui: Ui) -> int:
    """End all ranks; nothing to do is fine."""
    session = open_session(ui)
    with session.store.lock("stop"):
        stopped = session.cluster.stop()
    ui.line("stopped, no process is left" if stopped else "nothing runs")
    return ExitCode.OK


def status(ui: Ui, *, as_json: bool) -> int:
    """Every rank, and whether the model answers; exit 5 when it should and does not."""
    session = open_session(ui)
    current = session.store.current()
    if current is None:
        emit(ui, {"phase": "stopped", "ranks": []}, as_json, "nothing runs")
        return ExitCode.OK
    states = session.cluster.observe()
    answer = _answer(session, current, states)
    if as_json:
        emit(ui, _status_json(current, states, answer), True)
    else:
        _status_lines(ui, current, states, answer)
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
        "digest": current.plan.digest,
        "ready_at": current.ready_at,
        "answer": answer,
        "ranks": [asdict(state) for state in states],
    }


def _status_lines(
    ui: Ui, current: Current, states: Sequence[NodeState], answer: dict[str, Any]
) -> None:
    ui.line(f"{current.plan.served_name} at {current.plan.base_url}/v1, {current.phase}")
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
    if as_json:
        emit(ui, {name: health.last_lines(path, count) for name, path in files.items()}, True)
        return ExitCode.OK
    logs.show(ui, files, count, follow=follow)
    return ExitCode.OK


def show_plan(ui: Ui, *, as_json: bool) -> int:
    """Print what `start` would run, and change nothing."""
    session = open_session(ui)
    plan = plan_module.build(session.settings, session.facts)
    if as_json:
        emit(ui, plan.as_json(), True)
        return ExitCode.OK
    ui.line(f"plan {plan.digest}: {plan.served_name} at {plan.base_url}/v1")
    for number in plan.start_order:
        rank = plan.ranks[number]
        ui.line(f"\n# {rank.name}, {rank.role} on {rank.node}")
        ui.line("".join(f"{name}={shlex.quote(value)} \\\n" for name, value in rank.env)
                + "".join(f"{name}=(secret) \\\n" for name in rank.secret_env)
                + shlex.join(rank.argv))  # fmt: skip
    for warning in plan.warnings:
        ui.warn(warning)
    return ExitCode.OK


def doctor(ui: Ui, *, as_json: bool) -> int:
    """Everything that would refuse a launch, and the facts; exit 3 when something does."""
    session = open_session(ui)
    facts = session.facts
    try:
        plan = plan_module.build(session.settings, facts)
        findings = preflight.check(session.settings, facts, plan)
    except LaunchError as error:
        findings = [*error.findings, *preflight.check_engine(facts)]
    current = session.store.current()
    runs = current is not None and current.phase == "ready"
    findings = [f for f in findings if not (runs and f.code == "port-in-use")]
    known = {
        "python": sys.version.split()[0],
        "engine": shlex.join(facts.engine) or "none",
        "cores": len(facts.cores),
        "gpus": facts.gpus,
        "memory_available_gib": round(facts.memory_available_bytes / preflight.GIB, 1),
        "state": str(session.settings.GLM_STATE_DIR),
        "runs": current.plan.served_name if current else "nothing",
    }
    if as_json:
        emit(ui, {"facts": known, "findings": [asdict(finding) for finding in findings]}, True)
    else:
        ui.table(["fact", "value"], list(known.items()))
        if findings:
            ui.error(RefusedError(*findings))
        else:
            ui.line("nothing would refuse a launch")
    return ExitCode.REFUSED if findings else ExitCode.OK


def test(arguments: Sequence[str]) -> int:
    """Run the test suite with these pytest arguments; replaces this process."""
    command = [sys.executable, "-m", "pytest", *test_arguments(arguments, dict(os.environ))]
    os.chdir(REPOSITORY)
    os.execv(command[0], command)  # noqa: S606 (argv list, no shell)


def test_arguments(arguments: Sequence[str], environ: dict[str, str]) -> list[str]:
    """Static checks run in CI or with `--lint`; everything else is pytest's."""
    lint = "--lint" in arguments or bool(environ.get("CI"))
    passed = [argument for argument in arguments if argument != "--lint"]
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
