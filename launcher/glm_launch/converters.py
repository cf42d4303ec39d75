"""Programs of the plugin that convert weights on this machine.

With RUNTIME=local the engine's own Python runs them; otherwise a container of the image that sees
only what is mounted into it, and no network.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from glm_launch import facts
from glm_launch.errors import Finding, RefusedError
from glm_launch.nodes import supply
from glm_launch.nodes.models import Wanted, store_of
from glm_launch.settings import Settings

NOT_STARTED = (125, 126, 127)
"""What `docker run` returns when there was no container, or nothing to run in it."""
SOURCE_INSIDE = "/models/source"


def located(settings: Settings, one: Wanted, why: str) -> tuple[Path, Path]:
    """Folder of a checkpoint on this machine and the root to mount (the hub's links lead there).

    Raises RefusedError naming its setting where it is not here.
    """
    folder, root, _ = one.locate(store_of(settings))
    if not (folder / "config.json").is_file():
        raise RefusedError(
            Finding(
                "no-checkpoint",
                f"{one.source.repo} is not on this machine ({folder})",
                why,
                f"./start.sh download brings it, or set {one.key} to its folder",
            )
        )
    return folder, root


def engine_python(settings: Settings) -> str:
    """The engine's Python with the plugin: that beside its `vllm`, else this one."""
    engine = settings.ENGINE_COMMAND or facts.find_engine()
    beside_engine = Path(engine[0]).with_name("python") if engine else Path(sys.executable)
    return str(beside_engine if beside_engine.is_file() else Path(sys.executable))


def in_image(
    settings: Settings, module: str, docker: Sequence[str], arguments: Sequence[str]
) -> list[str]:
    """`docker run` of a module of the image; `docker` are its variables and mounts."""
    gpus = ["--gpus", "device=0"] if settings.DEVICE == "cuda" else []
    terminal = ["--interactive", "--tty"] if sys.stdin.isatty() and sys.stderr.isatty() else []
    return [
        "docker", "run", "--rm", "--init", *terminal, "--pull", "never", "--network", "none",
        "--security-opt", "no-new-privileges:true", "--user", f"{os.getuid()}:{os.getgid()}",
        "--env", "HOME=/tmp", "--entrypoint", "python3", *gpus, *docker,
        supply.local_name(supply.image_name(settings)), "-m", module, *arguments,
    ]  # fmt: skip


def call(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run a command and return its exit code. Raises RefusedError where docker started nothing."""
    contained = command[0] == "docker"
    try:
        done = subprocess.call(command, env=env)  # noqa: S603 (argv list, no shell)
    except FileNotFoundError:
        if not contained:
            raise
        done = NOT_STARTED[-1]
    if contained and done in NOT_STARTED:
        raise RefusedError(
            Finding(
                "docker-unusable",
                f"{command[0]} could not start {command[command.index('-m') - 1]} ({done})",
                "weights are converted inside the image",
                "./start.sh doctor tells what docker lacks; BUILD=1 or IMAGE gives the image",
            )
        )
    return done
