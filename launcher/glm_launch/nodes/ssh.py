"""Run commands on nodes: one `Shell` per node, here or over the system's OpenSSH.

What must stay true: a command is an argument list and is quoted in one place; nobody is ever asked
for a password; the user's ssh configuration, keys, agent and jump hosts apply; one connection per
node is shared by all later calls. A failure of ssh itself becomes one of `CAUSES`, each with the
command that shows or fixes it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from glm_launch.errors import Finding

CONNECT_S = 5
TIMEOUT_S = 30.0
SSH_FAILED = 255
TIMED_OUT = 124


@dataclass(frozen=True)
class Done:
    """A command that ended; `code` TIMED_OUT when it was cut off."""

    code: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def last_words(self) -> str:
        """The last line of stderr, or the exit code of a command that said nothing."""
        return (self.err.strip().splitlines() or [f"exit code {self.code}"])[-1]


class Shell(Protocol):
    """Commands on one node."""

    @property
    def name(self) -> str:
        """What the node is called in messages."""

    def argv(self, command: Sequence[str]) -> list[str]:
        """What to execute on this machine so that `command` runs on the node."""

    def run(self, command: Sequence[str], *, stdin: str = "", timeout_s: float = TIMEOUT_S) -> Done:
        """Run `command` on the node and wait."""


def execute(argv: Sequence[str], stdin: str, timeout_s: float) -> Done:
    """Run here, in the root folder; a missing program is code 127, a late one TIMED_OUT."""
    try:
        done = subprocess.run(
            argv, check=False, input=stdin, capture_output=True, text=True, timeout=timeout_s,
            errors="replace", cwd="/",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Done(TIMED_OUT, "", f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Done(127, "", f"{argv[0]}: {error.strerror}")
    return Done(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class LocalShell:
    """This machine."""

    name: str = "localhost"

    def argv(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def run(self, command: Sequence[str], *, stdin: str = "", timeout_s: float = TIMEOUT_S) -> Done:
        return execute(command, stdin, timeout_s)


@dataclass(frozen=True)
class SshShell:
    """A node by the name that ssh knows it by; `options` come before the fixed ones."""

    name: str
    target: str
    options: tuple[str, ...] = ()
    sockets: Path = field(default_factory=lambda: Path(f"/tmp/glm-exl3-{os.getuid()}"))  # noqa: S108

    def base(self) -> list[str]:
        """`ssh` with its options, as rsync's `-e` needs it, too."""
        fixed = {
            "BatchMode": "yes",
            "ConnectTimeout": str(CONNECT_S),
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
            "ControlMaster": "auto",
            "ControlPersist": "60",
            "ControlPath": str(self.sockets / "%C"),
        }
        pairs = [part for name, value in fixed.items() for part in ("-o", f"{name}={value}")]
        return ["ssh", *self.options, *pairs]

    def argv(self, command: Sequence[str]) -> list[str]:
        return [*self.base(), self.target, "--", shlex.join(command)]

    def run(self, command: Sequence[str], *, stdin: str = "", timeout_s: float = TIMEOUT_S) -> Done:
        self.sockets.mkdir(mode=0o700, exist_ok=True)
        return execute(self.argv(command), stdin, timeout_s)

    def close(self) -> None:
        """End the shared connection."""
        execute([*self.base(), "-O", "exit", self.target], "", 5.0)


@dataclass(frozen=True)
class Cause:
    """One way in which ssh fails."""

    code: str
    pattern: str
    seen: str
    fix: str


CAUSES = (
    Cause("ssh-missing", r"^ssh: No such file", "ssh is not installed here",
          "apt install openssh-client"),
    Cause("ssh-name", r"Could not resolve hostname|Name or service not known",
          "the name is unknown", "use an address, or add the name to /etc/hosts"),
    Cause("ssh-timeout", r"timed out|no answer within", "nothing answers at that address",
          "ping {target}; check WORKER_IP, power and cable"),
    Cause("ssh-route", r"No route to host|Network is unreachable", "the address is unreachable",
          "ip route get {target}; check WORKER_IP and the cable"),
    Cause("ssh-refused", r"Connection refused", "no ssh server listens there",
          "on the node: sudo systemctl enable --now ssh"),
    Cause("ssh-host-key-changed", r"IDENTIFICATION HAS CHANGED",
          "the node's host key is another one than before",
          "if the node was reinstalled: ssh-keygen -R {target}, then ssh {target} once"),
    Cause("ssh-host-key-unknown", r"host key is known|Host key verification failed",
          "the node's host key is not known", "ssh {target} once and accept its key"),
    Cause("ssh-key-file", r"UNPROTECTED PRIVATE|bad permissions|invalid format|error in libcrypto",
          "the private key file cannot be used", "chmod 600 the key, or make a new one"),
    Cause("ssh-agent", r"agent refused|communication with agent|incorrect passphrase|/dev/tty",
          "the key needs its passphrase", "ssh-add, so that an agent holds the key"),
    Cause("ssh-too-many", r"Too many authentication failures", "the agent offered too many keys",
          "set IdentityFile and IdentitiesOnly yes for {target} in ~/.ssh/config"),
    Cause("ssh-denied", r"Permission denied", "the node does not accept our key",
          "ssh-copy-id {target}; check WORKER_USER"),
    Cause("ssh-account", r"account is currently not available|nologin|account has expired",
          "the account cannot log in", "give that user a shell, or set WORKER_USER"),
    Cause("ssh-closed", r"Connection (closed|reset) by|kex_exchange_identification",
          "the node closed the connection", "there: journalctl -u ssh; MaxStartups, fail2ban"),
)  # fmt: skip


def classify(done: Done, target: str) -> Finding:
    """What went wrong with ssh itself, from what it said."""
    last = done.last_words
    for cause in CAUSES:
        if re.search(cause.pattern, done.err, re.MULTILINE):
            return Finding(
                cause.code,
                f"ssh to {target}: {cause.seen} ({last})",
                "the launcher starts and watches that node over ssh",
                cause.fix.format(target=target),
            )
    return Finding(
        "ssh-failed",
        f"ssh to {target} failed: {last}",
        "the launcher starts and watches that node over ssh",
        f"ssh -v {target} shows the details",
    )


def without_agent() -> bool:
    """Whether no agent holds a key: a key with a passphrase cannot be used then."""
    if not os.environ.get("SSH_AUTH_SOCK") or shutil.which("ssh-add") is None:
        return True
    return execute(["ssh-add", "-l"], "", 5.0).code != 0
