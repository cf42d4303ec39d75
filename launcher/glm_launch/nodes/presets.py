"""Presets and hardware descriptions: numbers from config/, each with the source it comes from.

Pure apart from reading files. A preset is a set of defaults: whatever the shell or `.env` says wins
over it. A file without a source for a number, with an unknown setting, or with a value that the
setting refuses is an error of this checkout and raises `ConfigurationError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from glm_launch.errors import ConfigurationError, Finding
from glm_launch.nodes.memory import GIB, Reserve
from glm_launch.paths import REPOSITORY
from glm_launch.settings import Settings

CONFIG = REPOSITORY / "config"
TENSOR_PARALLEL = (1, 2, 4)


@dataclass(frozen=True)
class Hardware:
    """A kind of node."""

    name: str
    capability: str
    unified_memory: bool
    reserve: Reserve


@dataclass(frozen=True)
class Preset:
    """Defaults for one kind of cluster; `sources` says where each value comes from."""

    name: str
    hardware: str | None
    nodes: int
    ranks_per_node: int
    settings: Mapping[str, Any]
    sources: Mapping[str, str]


def names(folder: Path = CONFIG / "presets") -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def preset(name: str, folder: Path = CONFIG / "presets") -> Preset:
    """The preset of that name; raises `ConfigurationError` with the names there are."""
    value = _load(name, folder, "preset")
    values, sources = _values(name, value.get("settings") or {})
    unknown = sorted(set(values) - set(Settings.model_fields))
    if unknown:
        raise _broken(name, f"{', '.join(unknown)} is not a setting")
    try:
        Settings.model_validate(values)
    except ValidationError as error:
        raise _broken(name, str(error.errors()[0]["msg"])) from None
    tensor_parallel(int(value["nodes"]), int(value["ranks_per_node"]))
    return Preset(name, value["hardware"], value["nodes"], value["ranks_per_node"], values, sources)


def hardware(name: str, folder: Path = CONFIG / "hardware") -> Hardware:
    """The hardware description of that name."""
    value = _load(name, folder, "hardware")
    values, _ = _values(name, value.get("reserve") or {})
    sizes = {key.removesuffix("_gib"): int(number * GIB) for key, number in values.items()}
    return Hardware(name, value["capability"], value["unified_memory"], Reserve(**sizes))


def tensor_parallel(nodes: int, ranks_per_node: int) -> int:
    """The number of ranks; raises `ConfigurationError` when the model cannot be cut so."""
    ranks = nodes * ranks_per_node
    if ranks in TENSOR_PARALLEL:
        return ranks
    allowed = ", ".join(map(str, TENSOR_PARALLEL))
    raise ConfigurationError(
        Finding(
            "bad-tensor-parallel",
            f"{nodes} node(s) with {ranks_per_node} rank(s) each make tensor parallelism {ranks}",
            "64 heads and expert width 2048 are cut evenly, in blocks of 128",
            f"use {allowed} ranks in all; with 3 nodes leave one out",
        )
    )


def _load(name: str, folder: Path, kind: str) -> dict[str, Any]:
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise ConfigurationError(
            Finding(
                f"no-such-{kind}",
                f"no {kind} is called {name}",
                "its numbers would be missing",
                f"one of: {', '.join(known)}",
            )
        )
    value = yaml.safe_load((folder / f"{name}.yaml").read_text())
    if not isinstance(value, dict) or value.get("name") != name:
        raise _broken(name, "its name is not that of its file")
    return value


def _values(name: str, entries: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    without = sorted(key for key, entry in entries.items() if not entry.get("source"))
    if without:
        raise _broken(name, f"{', '.join(without)} has no source")
    values = {key: entry["value"] for key, entry in entries.items()}
    return values, {key: str(entry["source"]) for key, entry in entries.items()}


def _broken(name: str, seen: str) -> ConfigurationError:
    return ConfigurationError(
        Finding("broken-preset", f"{name}: {seen}", "it cannot be used", "restore the file")
    )
