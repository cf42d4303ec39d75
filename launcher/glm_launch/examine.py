"""`doctor`: the facts of every machine, and everything that would refuse a launch, with its fix."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glm_launch import preflight
from glm_launch.errors import ExitCode, Finding, LaunchError, RefusedError
from glm_launch.nodes.deploy import Deployment
from glm_launch.session import LocalBackend, Session, open_session
from glm_launch.ui import Ui


def doctor(ui: Ui, *, as_json: bool, record: str = "", verify_weights: bool = False) -> int:
    """Show facts and findings; exit 3 when something would refuse a launch.

    `record` names a file for the facts of all nodes; `verify_weights` reads every byte of the
    weights on every node.
    """
    out = Ui(out=sys.stderr) if as_json else ui
    session = open_session(out)
    backend = session.backend
    current = session.store.current()
    runs = current is not None and current.phase == "ready"
    if isinstance(backend, Deployment):
        facts, findings, warnings = _of_nodes(session, backend, held=runs)
        if record:
            _record(out, backend, Path(record))
        findings += _hashed(backend) if verify_weights and not findings else []
    else:
        assert isinstance(backend, LocalBackend)
        facts, findings = _of_this_machine(session, backend, held=runs)
        warnings = []
        findings += _only_nodes(record, verify_weights)
    if as_json:
        told = {"facts": facts, "findings": list(map(asdict, findings)),
                "warnings": list(map(asdict, warnings))}  # fmt: skip
        ui.line(json.dumps(told, indent=2))
    else:
        _say(ui, facts, findings, warnings)
    return ExitCode.REFUSED if findings else ExitCode.OK


def _say(
    ui: Ui, facts: dict[str, Any], findings: Sequence[Finding], warnings: Sequence[Finding]
) -> None:
    if nodes := facts.get("nodes"):
        ui.table(list(nodes[0]), [list(node.values()) for node in nodes])
        for line in facts["devices"]:
            ui.line(f"  {line}")
    else:
        ui.table(["fact", "value"], list(facts.items()))
    for warning in warnings:
        ui.warn(f"{warning.seen}; {warning.fix}")
    if findings:
        ui.error(RefusedError(*findings))
    else:
        ui.line("nothing would refuse a launch")


def _of_this_machine(
    session: Session, backend: LocalBackend, *, held: bool
) -> tuple[dict[str, Any], list[Finding]]:
    facts = backend.facts
    try:
        backend.require()
        findings = preflight.check(session.settings, facts, backend.plan())
    except LaunchError as error:
        findings = [*error.findings, *preflight.check_engine(facts)]
    current = session.store.current()
    known = {
        "python": sys.version.split()[0],
        "engine": shlex.join(facts.engine) or "none",
        "cores": len(facts.cores),
        "gpus": facts.gpus,
        "memory_available_gib": round(facts.memory_available_bytes / preflight.GIB, 1),
        "state": str(session.settings.GLM_STATE_DIR),
        "runs": current.plan.served_name if current else "nothing",
    }
    return known, [f for f in findings if not (held and f.code == "port-in-use")]


def _of_nodes(
    session: Session, backend: Deployment, *, held: bool
) -> tuple[dict[str, Any], list[Finding], list[Finding]]:
    looked = backend.survey()
    choices, _ = looked.choices(session.settings)
    rows, devices = [], []
    for name, (site, facts), choice in zip(looked.names(), looked.known, choices, strict=True):
        image = facts.image(backend.image)
        rows.append({
            "node": name, "address": site.address, "arch": facts.arch, "cores": facts.cores,
            "memory_available_gib": round(facts.memory.available / preflight.GIB, 1),
            "gpus": ", ".join(gpu.name for gpu in facts.gpus) or "none",
            "docker": facts.docker.version or facts.docker.error,
            "image": image.fingerprint if image else "absent",
        })  # fmt: skip
        devices += [f"{name}: {why}" for why in choice.why]
    try:
        backend.require()
        report = backend.check(held=held)
        findings, warnings = list(report.findings), list(report.warnings)
    except LaunchError as error:
        findings, warnings = [*looked.missing, *error.findings], []
    return {"nodes": rows, "devices": devices}, findings, warnings


def _record(ui: Ui, backend: Deployment, path: Path) -> None:
    """Facts as JSON, in the form of tests/fixtures/nodes."""
    looked = backend.survey()
    value = {
        "origin": "recorded by doctor --record",
        "addresses": [site.address for site, _ in looked.known],
        "nodes": [asdict(facts) for facts in looked.facts],
    }
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    ui.line(f"facts of {len(looked.facts)} node(s) are in {path}; they hold addresses and names")


def _hashed(backend: Deployment) -> list[Finding]:
    """A full hash of the weights everywhere; what is wrong is transferred again."""
    try:
        backend.ensure_weights(full=True)
    except LaunchError as error:
        return list(error.findings)
    return []


def _only_nodes(record: str, verify_weights: bool) -> list[Finding]:
    asked = ["--record"] * bool(record) + ["--verify-weights"] * verify_weights
    return [
        Finding(
            "containers-only",
            f"{option} with RUNTIME=local",
            "it is about nodes that run containers",
            "RUNTIME=containers ./start.sh doctor " + option,
        )
        for option in asked
    ]
