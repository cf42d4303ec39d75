"""The container of one node as a `docker run` command, and what docker says about it.

Pure. `compose/node.yaml` asks for the same container; a test compares the two. What must stay true:
never privileged, weights read-only, the key only as a mounted file, docker never restarts a node.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm_launch.nodes.preflight import GENERATION_LABEL, OWNER_LABEL, PROJECT_LABEL
from glm_launch.plan import Box

PROJECT = "glm-exl3"
RANK_LABEL = "io.glm-exl3.node-rank"
KEY_TARGET = "/run/secrets/api-key"
CACHE_VOLUME = "glm-exl3-cache"
CACHE_TARGET = "/cache"


__all__ = ["Box", "Inspected", "name_of", "parse_inspect", "run_argv"]


def name_of(rank: int) -> str:
    return f"{PROJECT}-node{rank}"


def run_argv(
    box: Box, rank: int, generation: str, argv: Sequence[str], env: Sequence[tuple[str, str]],
    *, grace_s: int, key_file: str = "",
) -> list[str]:  # fmt: skip
    """The command that starts the container and returns."""
    labels = {
        PROJECT_LABEL: PROJECT, GENERATION_LABEL: generation, OWNER_LABEL: box.owner,
        RANK_LABEL: str(rank),
    }  # fmt: skip
    command = [
        "docker", "run", "--detach", "--name", name_of(rank), "--restart", "no", "--pull", "never",
        "--network", "host", "--ipc", "private", "--shm-size", box.shm_size,
        "--stop-timeout", str(grace_s), "--security-opt", "no-new-privileges:true",
        "--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "--ulimit", "nofile=65536",
    ]  # fmt: skip
    for label, value in labels.items():
        command += ["--label", f"{label}={value}"]
    variables = dict(env) | {"GLM_EXL3_GENERATION": generation}
    variables |= {"VLLM_API_KEY_FILE": KEY_TARGET} if key_file else {}
    for variable, value in sorted(variables.items()):
        command += ["--env", f"{variable}={value}"]
    mounts = [*box.mounts, *([(key_file, KEY_TARGET)] if key_file else [])]
    for source, target in mounts:
        command += ["--mount", f"type=bind,source={source},target={target},readonly"]
    command += ["--mount", f"type=volume,source={CACHE_VOLUME},target={CACHE_TARGET}"]
    if box.gpus:
        command += ["--gpus", box.gpus]
    if box.rdma:
        command += ["--cap-add", "IPC_LOCK", "--device", "/dev/infiniband:/dev/infiniband"]
    return [*command, box.image, *argv]


@dataclass(frozen=True)
class Inspected:
    """A container as docker sees it; times are docker's text."""

    status: str
    exit_code: int
    oom: bool
    pid: int
    started: str
    ended: str
    generation: str
    error: str = ""
    ours: bool = False


def parse_inspect(text: str) -> Inspected | None:
    """The answer of `docker inspect NAME`; None when there is no such container."""
    try:
        entries = json.loads(text)
    except ValueError:
        return None
    if not entries:
        return None
    state: dict[str, Any] = entries[0].get("State") or {}
    labels = (entries[0].get("Config") or {}).get("Labels") or {}
    return Inspected(
        status=str(state.get("Status", "")), exit_code=int(state.get("ExitCode") or 0),
        oom=bool(state.get("OOMKilled")), pid=int(state.get("Pid") or 0),
        started=str(state.get("StartedAt", "")), ended=str(state.get("FinishedAt", "")),
        generation=str(labels.get(GENERATION_LABEL, "")), error=str(state.get("Error") or ""),
        ours=labels.get(PROJECT_LABEL) == PROJECT,
    )  # fmt: skip
