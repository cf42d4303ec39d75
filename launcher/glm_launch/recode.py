"""Dense projections in fewer bits: what ranks need for it, and `./start.sh recode`.

`fp8` and `int8` happen while loading and need variables only. `exl3` needs matrices that the
plugin's command (`python -m glm_exl3.recode`) makes once: run by the engine's own Python with
RUNTIME=local, inside the image otherwise, without a network and with the weights mounted read-only.
The command says itself what exists already; ranks refuse a cache that is stale or incomplete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from glm_launch import converters, dense, edits
from glm_launch.errors import ConfigurationError, Finding
from glm_launch.nodes.models import wanted
from glm_launch.session import open_session
from glm_launch.settings import Settings
from glm_launch.ui import Ui

MODULE = "glm_exl3.recode"


def run(ui: Ui, *, verify: bool = False) -> int:
    """Make what is missing; the command's exit code is returned and its progress shown."""
    settings = open_session(ui).settings
    if settings.DENSE_RECODE != "exl3":
        raise ConfigurationError(
            Finding(
                "nothing-to-recode",
                f"DENSE_RECODE={settings.DENSE_RECODE}",
                "only exl3 is made beforehand; fp8 and int8 happen while loading",
                "set DENSE_RECODE=exl3, or just start",
            )
        )
    folder, root = located(settings)
    cache = dense.cache_root(settings)
    cache.mkdir(parents=True, exist_ok=True)
    options = ["--verify"] if verify else []
    settled = edits.settle(settings.model_copy(update={"DENSE_RECODE": "off"}))
    contained = settings.runtime != "local"
    env = {**dense.environment(settings), **edits.variables(settled, contained=contained)}
    if not contained:
        command = local_command(settings, folder, cache, options)
        return converters.call(command, {**os.environ, **env})
    mounts = [(str(here), inside) for here, inside in settled.folders]
    command = container_command(settings, (folder, root), cache, env, mounts, options)
    return converters.call(command)


def located(settings: Settings) -> tuple[Path, Path]:
    """Folder of the checkpoint, and the root to mount (the hub's links lead there)."""
    if not settings.MODEL:
        raise ConfigurationError(
            Finding("no-model", "MODEL is empty", "there is nothing to recode", "set MODEL")
        )
    target = wanted(settings)[0]
    return converters.located(settings, target, "every dense weight of it is read")


def local_command(
    settings: Settings, folder: Path, cache: Path, options: Sequence[str]
) -> list[str]:
    python = converters.engine_python(settings)
    return [python, "-m", MODULE, str(folder), "--cache", str(cache), *options]


def container_command(  # noqa: PLR0913, PLR0917 - what a container is made of
    settings: Settings,
    model: tuple[Path, Path],
    cache: Path,
    env: Mapping[str, str],
    mounts: Sequence[tuple[str, str]],
    options: Sequence[str],
) -> list[str]:
    """A container that sees the weights, what edits them, and the cache."""
    folder, root = model
    inside = Path(converters.SOURCE_INSIDE) / folder.relative_to(root)
    variables = [word for pair in sorted(env.items()) for word in ("--env", "=".join(pair))]
    binds = [(str(root), converters.SOURCE_INSIDE), *mounts]
    docker = [
        *variables,
        *(f"--mount=type=bind,source={here},target={there},readonly" for here, there in binds),
        f"--mount=type=bind,source={cache},target={edits.INSIDE_DENSE}",
    ]
    arguments = [str(inside), "--cache", edits.INSIDE_DENSE, *options]
    return converters.in_image(settings, MODULE, docker, arguments)
