"""`report`: one archive with everything that helps somebody else to understand a failure.

    glm-exl3-report-TIME.tar.gz    settings, plan, states, supervisor, logs, facts of all nodes

What must stay true: whatever goes in passes `Redactor`, file names included; a part that cannot be
gathered leaves a line that says why and never keeps the rest away; nothing is sent anywhere.
"""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from pydantic import SecretStr

from glm_launch.errors import ExitCode
from glm_launch.nodes.ssh import LocalShell, Shell, SshShell
from glm_launch.paths import REPOSITORY, env_file
from glm_launch.plan import LaunchPlan
from glm_launch.report_redact import HIDDEN, Redactor
from glm_launch.session import Session, open_session
from glm_launch.ui import Ui

KEPT_LAUNCHES = 3
LOG_BYTES = 2 << 20
COMMAND_S = 20.0
COMMANDS = (
    ("uname", "-a"),
    ("nvidia-smi",),
    ("docker", "version"),
    ("docker", "ps", "--all", "--filter", "label=io.glm-exl3.project"),
    ("free", "-b"),
    ("df", "-h"),
    ("ip", "-brief", "address"),
    ("rdma", "link"),
    ("sh", "-c", "dmesg --time-format iso 2>&1 | tail -n 200"),
)


def report(ui: Ui, *, keep_addresses: bool = False, folder: str = "") -> int:
    """Write the archive and say where it is."""
    session = open_session(ui)
    redact = redactor_of(session, keep_addresses=keep_addresses)
    name = f"glm-exl3-report-{time.strftime('%Y%m%d-%H%M%S')}"
    target = (Path(folder) if folder else Path.cwd()) / f"{name}.tar.gz"
    write(target, name, redact, gather(session))
    ui.line(f"wrote {target} ({target.stat().st_size / 1024:.0f} KiB)")
    ui.line("keys and tokens are hidden; look into it before you pass it on")
    return ExitCode.OK


def redactor_of(session: Session, *, keep_addresses: bool) -> Redactor:
    """Knows every secret of the settings, the content of a key file, and the names of this site."""
    secrets = [value.get_secret_value() for _, value in session.settings
               if isinstance(value, SecretStr)]  # fmt: skip
    secrets += session.settings.secrets().values()
    secrets += [value for name, value in os.environ.items()
                if name.endswith(("_KEY", "_TOKEN", "_PASSWORD", "_SECRET"))]  # fmt: skip
    if session.settings.VLLM_API_KEY_FILE:
        secrets.append(_read(Path(session.settings.VLLM_API_KEY_FILE).expanduser()).strip())
    names = {str(Path.home()): "~", getpass.getuser(): "user", platform.node(): "this-machine"}
    plan = plan_of(session)
    names |= {rank.node: f"node{rank.rank}" for rank in plan.ranks} if plan else {}
    names |= {name: f"worker-{n}" for n, name in enumerate(session.settings.WORKER_SSH)}
    return Redactor(secrets, {name: alias for name, alias in names.items() if len(name) > 2},
                    keep_addresses)  # fmt: skip


def gather(session: Session) -> Iterator[tuple[str, Callable[[], str]]]:
    """Names of files and what makes their text."""
    folder = session.store.folder
    yield "settings.json", lambda: _settings(session)
    yield "versions.txt", _versions
    yield "status.json", lambda: _status(session)
    for name in ("state.json", "log", "metrics.prom"):
        yield f"supervisor/{name}", lambda path=folder / "supervisor" / name: _tail(path)  # type: ignore[misc]
    launches = sorted(path for path in session.store.launches.glob("*") if path.is_dir())
    for launch in launches[-KEPT_LAUNCHES:]:
        for path in sorted(launch.iterdir()):
            yield f"launches/{launch.name}/{path.name}", lambda path=path: _tail(path)  # type: ignore[misc]
    plan = plan_of(session)
    shells = {rank.node: _shell(rank.node, rank.ssh) for rank in plan.ranks} if plan else {}
    for node, shell in (shells or {"localhost": LocalShell()}).items():
        yield f"nodes/{node}.txt", lambda shell=shell: _node(shell)  # type: ignore[misc]


def write(
    target: Path, root: str, redact: Redactor, parts: Iterator[tuple[str, Callable[[], str]]]
) -> None:
    """The archive, readable by its owner only."""
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as raw:
        with tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for name, make in parts:
                try:
                    text = make()
                except Exception as error:  # noqa: BLE001 (one part never keeps the rest away)
                    text = f"could not be gathered: {type(error).__name__}: {error}\n"
                data = redact(text).encode("utf-8", "replace")
                info = tarfile.TarInfo(f"{root}/{redact(name)}")
                info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
                archive.addfile(info, io.BytesIO(data))


def plan_of(session: Session) -> LaunchPlan | None:
    """The plan of what runs, else of the last launch that was recorded."""
    current = session.store.current()
    if current is not None:
        return current.plan
    name = session.store.last_generation()
    if name is None:
        return None
    try:
        return LaunchPlan.from_json(json.loads(_read(session.store.launches / name / "plan.json")))
    except (ValueError, KeyError, TypeError):
        return None


def _settings(session: Session) -> str:
    values = {
        name: (HIDDEN if value is not None else None) if isinstance(value, SecretStr) else value
        for name, value in session.settings
    }
    return json.dumps(values, indent=1, default=str)


def _versions() -> str:
    shell = LocalShell()
    commit = shell.run(["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]).out
    return f"commit {commit.strip()}\npython {sys.version}\n{platform.platform()}\n"


def _status(session: Session) -> str:
    current = session.store.current()
    value = {
        "settings_file": str(env_file()),
        "phase": current.phase if current else "stopped",
        "generation": current.generation if current else None,
        "ranks": [asdict(state) for state in session.cluster.observe()],
    }
    return json.dumps(value, indent=1, default=str)


def _shell(node: str, ssh: str) -> Shell:
    return SshShell(node, ssh) if ssh else LocalShell(node)


def _node(shell: Shell) -> str:
    parts = []
    for command in COMMANDS:
        done = shell.run(command, timeout_s=COMMAND_S)
        parts.append(f"$ {' '.join(command)}\n{done.out}{done.err}[exit code {done.code}]\n")
    return "\n".join(parts)


def _tail(path: Path) -> str:
    """The end of a file; a long log says how much is missing."""
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - LOG_BYTES))
        text = stream.read().decode("utf-8", "replace")
    if size <= LOG_BYTES:
        return text
    return f"({size - LOG_BYTES} bytes before this are left out)\n{text.partition(chr(10))[2]}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
