"""Docker's health check: does this node's engine run, and on the head, does it answer?

Exit 0 or 1 with one line. It reads what PID 1 and its canary left in the run folder. The head is
unhealthy when two canaries in a row were not answered, and `/health` must answer as well; that
alone proves nothing about the workers (it stays 200 without them), so whoever decides about
restarts looks at every node.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

TIMEOUT_S = 5.0
STOPPED = "ZXTt"
CANARIES = 2


def judge(environ: Mapping[str, str]) -> tuple[bool, str]:
    """Whether the node is healthy, and what was seen."""
    folder = Path(environ.get("GLM_EXL3_RUN_DIR") or "/run/glm-exl3")
    try:
        state = json.loads((folder / "state.json").read_text())
        phase, pid = str(state["phase"]), state["engine_pid"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return False, f"no state of PID 1: {type(error).__name__}"
    if phase != "engine" or not isinstance(pid, int):
        return False, f"no engine, PID 1 is at: {phase}"
    letter = process_state(pid)
    if letter in STOPPED:
        return False, f"the engine (pid {pid}) is in state {letter}"
    if state["node_rank"] != 0:
        return True, f"the engine (pid {pid}) runs"
    if (failed := failed_canaries(folder)) >= CANARIES:
        return False, f"{failed} canaries in a row were not answered"
    return answers(str(state["host"]), int(state["port"]))


def failed_canaries(folder: Path) -> int:
    """How many canaries in a row failed, as PID 1's canary noted it; 0 while nothing is known."""
    try:
        return int(json.loads((folder / "health.json").read_text())["failures"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def process_state(pid: int) -> str:
    """The kernel's letter for a process; X when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def answers(host: str, port: int) -> tuple[bool, str]:
    """Whether `GET /health` gives 200."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (compared, not bound)
    connection = http.client.HTTPConnection(local, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except OSError as error:
        return False, f"{local}:{port} does not answer: {type(error).__name__}"
    finally:
        connection.close()
    return status == 200, f"/health at {local}:{port} gives {status}"


if __name__ == "__main__":
    healthy, seen = judge(os.environ)
    sys.stdout.write(f"{seen}\n")
    sys.exit(0 if healthy else 1)
