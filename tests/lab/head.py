"""`./start.sh` as a user runs it: on the head of a lab, whose checkout keeps nothing.

The node sees this checkout at its own path with a layer above it, so that everything that a verb
writes stays in the node. The environment of a command is what the test says and nothing else.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab import ENVIRONMENT, HOME, ROOT, Lab, Node, run

from glm_launch.nodes.ssh import Done, execute

STATE = f"{HOME}/.local/state/glm-exl3"


@dataclass
class Head:
    """The first node with what a user has there: checkout, key and ssh configuration."""

    lab: Lab
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def node(self) -> Node:
        return self.lab.nodes[0]

    def move_in(self) -> None:
        """Lay out checkout, Python and ssh; once per node."""
        work = self.node.work / "checkout"
        inside = self.node.work / "root" / str(ROOT).lstrip("/")
        enter = ("nsenter", "--target", str(self.node.init), "--mount", "--")
        for folder in (work / "upper", work / "work"):
            folder.mkdir(parents=True)
        run(*enter, "mkdir", "-p", str(inside))
        layers = f"lowerdir={ROOT},upperdir={work / 'upper'},workdir={work / 'work'}"
        run(*enter, "mount", "-t", "overlay", "overlay", "-o", layers, str(inside))
        self.node.bring_in(*_python())
        self._ssh()

    def _ssh(self) -> None:
        inside = self.node.work / "lab"
        shutil.copy2(self.lab.folder / "key", inside / "key")
        shutil.copy2(self.lab.folder / "known_hosts", inside / "known_hosts")
        config = (self.lab.folder / "ssh_config").read_text()
        (inside / "ssh_config").write_text(config.replace(f"{self.lab.folder}/", "/lab/"))
        done = self.node.shell.run(
            [
                "sh",
                "-c",
                f"cp /lab/ssh_config {HOME}/.ssh/config && chmod 600 {HOME}/.ssh/* /lab/key",
            ]
        )
        assert done.ok, done.err

    def argv(self, arguments: Sequence[str], settings: dict[str, str]) -> list[str]:
        env = ENVIRONMENT | {"USER": "root", "SUPERVISE": "0"} | self.settings | settings
        pairs = [f"{key}={value}" for key, value in env.items()]
        # A session of its own: Ctrl-C reaches the verb and what it started, and no one else.
        return self.node.shell.argv(["setsid", "env", "-i", *pairs, f"{ROOT}/start.sh", *arguments])

    def run(self, *arguments: str, timeout_s: float = 120.0, **settings: str) -> Done:
        """A verb to its end."""
        return execute(self.argv(arguments, settings), "", timeout_s)

    def popen(self, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        """A verb that a test interrupts."""
        return subprocess.Popen(
            self.argv(arguments, settings), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    @staticmethod
    def ctrl_c(verb: subprocess.Popen[str]) -> None:
        """What a terminal does to a verb of `popen` and to all that it started."""
        inside = Path(f"/proc/{verb.pid}/task/{verb.pid}/children").read_text()
        os.killpg(int(inside), signal.SIGINT)

    def sent_bytes(self) -> int:
        """What the head sent over both networks since it has power."""
        command = ["sh", "-c", "cat /sys/class/net/en*/statistics/tx_bytes"]
        return sum(map(int, self.node.shell.run(command).out.split()))


def _python() -> list[Path]:
    """What the environment's Python needs from outside of the checkout."""
    base = Path(sys.base_prefix)
    if base != Path("/usr"):
        return [base]
    version = f"python3.{sys.version_info[1]}"
    return [base / "lib" / version, base / "bin" / version]
