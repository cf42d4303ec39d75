"""Dense projections in fewer bits: variables and folder that ranks need for it.

Pure, except that `require_cache` looks for files.
"""

from __future__ import annotations

from pathlib import Path

from glm_exl3.format.recode import Recode, parse_groups
from glm_exl3.format.recode_cache import FOLDER, MANIFEST
from glm_launch.errors import Finding, RefusedError
from glm_launch.settings import Settings

COMMAND = "./start.sh recode"


def asked(settings: Settings) -> Recode:
    """What the settings ask for."""
    return Recode(settings.DENSE_RECODE, parse_groups(settings.DENSE_GROUPS), settings.DENSE_BITS)


def environment(settings: Settings) -> dict[str, str]:
    """The plugin's variables; empty when nothing is recoded."""
    recode = asked(settings)
    if not recode.active:
        return {}
    return {
        "GLM_EXL3_DENSE_RECODE": recode.scheme,
        "GLM_EXL3_DENSE_GROUPS": ",".join(recode.groups),
        "GLM_EXL3_DENSE_BITS": str(recode.bits),
        "GLM_EXL3_DENSE_FREED": settings.DENSE_FREED,
    }


def cache_root(settings: Settings) -> Path:
    """The folder above `recoded/`."""
    if settings.DENSE_CACHE:
        return Path(settings.DENSE_CACHE).expanduser().absolute()
    if settings.runtime == "local" and Path(settings.MODEL).is_dir():
        return Path(settings.MODEL).absolute()
    return settings.GLM_STATE_DIR / "dense"


def findings(settings: Settings) -> list[Finding]:
    """Settings that do not go together."""
    if settings.DENSE_FREED != "host":
        return []
    if settings.DENSE_RECODE == "off":
        seen, why = "DENSE_RECODE=off", "nothing is freed"
    elif settings.KV_CACHE_MEMORY_BYTES:
        seen = f"KV_CACHE_MEMORY_BYTES={settings.KV_CACHE_MEMORY_BYTES}"
        why = "the size of the KV cache is fixed, so all the rest is left free already"
    else:
        return []
    return [Finding("dense-freed", f"DENSE_FREED=host with {seen}", why, "leave one of them out")]


def require_cache(settings: Settings) -> Path:
    """The folder with made matrices. Raises `RefusedError` when there are none at all."""
    folder = cache_root(settings) / FOLDER
    pattern = f"exl3-k{settings.DENSE_BITS}-*/{MANIFEST}"
    if not any(folder.glob(pattern)):
        raise RefusedError(
            Finding(
                "recode-missing",
                f"{folder} holds no matrices at {settings.DENSE_BITS} bits",
                "DENSE_RECODE=exl3 serves matrices that are made once",
                COMMAND,
            )
        )
    return folder.parent
