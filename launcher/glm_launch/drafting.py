"""Whether target and drafter go together, from their folders, before anything is touched.

The rules are the plugin's own (`glm_exl3.format.drafting`). A folder that cannot be read is not
judged here: `checkpoint.check` tells what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from glm_launch.errors import ConfigurationError, Finding, raise_if_any
from glm_launch.settings import Settings


def require(settings: Settings, target: Path, drafter: Path | None = None) -> None:
    """Raise `ConfigurationError` with everything that `findings` finds."""
    raise_if_any(ConfigurationError, findings(settings, target, drafter))


def findings(settings: Settings, target: Path, drafter: Path | None) -> list[Finding]:
    """Everything that speaks against drafting as the settings ask for it."""
    return [*_cache(settings), *_pair(settings, target, drafter)]


def _cache(settings: Settings) -> list[Finding]:
    """The type of the drafter's cache on the GPUs that PRESET is for; unknown ones, no finding."""
    if settings.SPEC_METHOD != "dflash" or not settings.PRESET:
        return []
    from glm_exl3.format.drafting import cache_problem
    from glm_launch.nodes import presets

    kind = presets.preset(settings.PRESET).hardware
    major = int(presets.hardware(kind).capability.partition(".")[0]) if kind else None
    found = cache_problem(
        settings.DRAFT_KV_CACHE_DTYPE, graphs=not settings.ENFORCE_EAGER, capability=major
    )
    if found is None:
        return []
    seen = f"DRAFT_KV_CACHE_DTYPE=fp8 with PRESET={settings.PRESET}: {found.seen}"
    return [Finding(found.code, seen, found.why, "leave DRAFT_KV_CACHE_DTYPE empty")]


def _pair(settings: Settings, target: Path, drafter: Path | None) -> list[Finding]:
    from glm_exl3.format import drafting
    from glm_exl3.format.errors import FormatError

    try:
        if settings.SPEC_METHOD == "mtp":
            text = text_config(target)
            return _as_findings("MODEL", target, drafting.mtp_problems(text, _names(target)))
        if settings.SPEC_METHOD == "dflash" and drafter is not None:
            pair = drafting.Pair(
                text_config(target),
                _config(drafter),
                settings.DFLASH_TOKENS,
                settings.tensor_parallel,
                _headers(drafter),
            )
            return _as_findings("DFLASH_MODEL", drafter, drafting.dflash_problems(pair))
    except (FormatError, OSError):
        pass
    return []


def _as_findings(key: str, folder: Path, problems: Iterable[Any]) -> list[Finding]:
    return [
        Finding(found.code, f"{key}={folder}: {found.seen}", found.why, found.fix)
        for found in problems
    ]


def _config(folder: Path) -> dict[str, Any]:
    from glm_exl3.format.headers import read_object

    return read_object(folder / "config.json")


def text_config(folder: Path) -> dict[str, Any]:
    """The language model's part of a target's config.json."""
    config = _config(folder)
    found = config.get("text_config", config)
    return found if isinstance(found, dict) else config


def _headers(folder: Path) -> Any:
    from glm_exl3.format.metadata import CheckpointIndex

    return CheckpointIndex.read(folder).tensors


def _names(folder: Path) -> Iterable[str]:
    """Names of all tensors, from the index alone where there is one: it is enough and quick."""
    from glm_exl3.format.headers import read_header, read_object
    from glm_exl3.format.metadata import INDEX_FILE, SINGLE_FILE

    index = folder / INDEX_FILE
    if not index.exists():
        return read_header(folder / SINGLE_FILE)
    named = read_object(index).get("weight_map")
    return named if isinstance(named, dict) else ()
