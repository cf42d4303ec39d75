"""`./start.sh drafter pack`: convert the drafter of the settings to EXL3, on this machine.

The work is the plugin's (`python -m glm_exl3.drafter`); here it gets its folders: run by the
engine's own Python with RUNTIME=local, inside the image otherwise, without a network and with the
drafter mounted read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glm_launch import converters
from glm_launch.errors import ConfigurationError, Finding
from glm_launch.nodes.models import wanted
from glm_launch.session import open_session
from glm_launch.settings import Settings
from glm_launch.ui import Ui

MODULE = "glm_exl3.drafter"
OUT_INSIDE = "/models/out"


def pack(ui: Ui, *, bits: int, out: str = "", arguments: Sequence[str] = ()) -> int:
    """Run the converter; its exit code is returned, and what it says is shown as it says it."""
    settings = open_session(ui).settings
    folder, root = located(settings)
    target = Path(out).expanduser().absolute() if out else beside(settings, folder, bits)
    target.parent.mkdir(parents=True, exist_ok=True)
    options = ["--bits", str(bits), *arguments]
    if settings.runtime == "local":
        command = local_command(settings, folder, target, options)
    else:
        command = container_command(settings, folder, root, target, options)
    done = converters.call(command)
    if not done and settings.runtime != "local":
        ui.line(f"the folder is {target}; put into .env: DFLASH_MODEL={target}")
    return done


def located(settings: Settings) -> tuple[Path, Path]:
    """Folder of the drafter and the root it must be mounted from (the hub's links lead there)."""
    if settings.SPEC_METHOD != "dflash" or not settings.DFLASH_MODEL:
        raise ConfigurationError(
            Finding(
                "no-drafter",
                f"SPEC_METHOD={settings.SPEC_METHOD} and DFLASH_MODEL={settings.DFLASH_MODEL}",
                "the drafter of the settings is what is packed",
                "set SPEC_METHOD=dflash and DFLASH_MODEL to the BF16 drafter",
            )
        )
    drafter = wanted(settings)[-1]
    return converters.located(settings, drafter, "packing reads every weight of it")


def beside(settings: Settings, folder: Path, bits: int) -> Path:
    """Where the packed drafter goes by default: beside a folder, else below the state folder."""
    if Path(settings.DFLASH_MODEL).expanduser().is_dir():
        return folder.with_name(f"{folder.name}-exl3-{bits}bpw")
    name = settings.DFLASH_MODEL.replace("/", "--")
    return settings.GLM_STATE_DIR / "drafters" / f"{name}-exl3-{bits}bpw"


def local_command(settings: Settings, folder: Path, out: Path, options: Sequence[str]) -> list[str]:
    python = converters.engine_python(settings)
    return [python, "-m", MODULE, str(folder), str(out), *options]


def container_command(
    settings: Settings, folder: Path, root: Path, out: Path, options: Sequence[str]
) -> list[str]:
    """A container that sees the drafter and the folder of the result."""
    inside = Path(converters.SOURCE_INSIDE) / folder.relative_to(root)
    mounts = [
        "--mount", f"type=bind,source={root},target={converters.SOURCE_INSIDE},readonly",
        "--mount", f"type=bind,source={out.parent},target={OUT_INSIDE}",
    ]  # fmt: skip
    arguments = [str(inside), f"{OUT_INSIDE}/{out.name}", *options]
    return converters.in_image(settings, MODULE, mounts, arguments)
