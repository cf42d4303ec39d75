"""Read settings from shell, `.env`, preset and defaults, and report every error at once.

What must stay true: a variable of the shell wins over `.env`, which wins over the preset; an empty
value means "not set"; each error names the key, where its value came from and what is allowed; no
message holds a secret; nothing but these files is looked at.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dotenv.parser import parse_stream
from pydantic import ValidationError

from glm_launch import successors
from glm_launch.errors import ConfigurationError, Finding
from glm_launch.paths import env_file as default_env_file
from glm_launch.paths import state_default
from glm_launch.settings import Settings, group_of
from glm_launch.settings_checks import cross_checks

SECRET_KEYS = frozenset({"VLLM_API_KEY", "HF_TOKEN", "GHCR_TOKEN"})
KEY_FILE = "api-key"
_HINT = "edit .env or the shell variable; docs/configuration.md lists every setting"


@dataclass(frozen=True)
class Loaded:
    """Settings, the keys that were set on purpose, and remarks on keys nobody reads."""

    settings: Settings
    chosen: frozenset[str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Value:
    text: str
    origin: str


def load(
    environ: Mapping[str, str] = os.environ,
    env_file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Loaded:
    """Settings from `overrides`, `environ`, `env_file`, `defaults`, the preset and the fields.

    They count in that order. Raises `ConfigurationError` with one finding per wrong value.
    """
    values, warnings, findings = _from_file(env_file or default_env_file(environ))
    for key in Settings.model_fields:
        if environ.get(key, "").strip():
            values[key] = _Value(environ[key], "shell")
    known = list(Settings.model_fields)
    warnings += [
        successors.remark(key, "shell", known) for key in successors.foreign(environ)
        if environ[key].strip()
    ]  # fmt: skip
    chosen = frozenset(values)
    given: dict[str, Any] = {key: value.text for key, value in values.items()}
    given |= overrides or {}
    preset, wrong = _preset(str(given.get("PRESET", "")))
    findings += wrong
    merged: dict[str, Any] = {**preset, **(defaults or {}), **given}
    merged.setdefault("GLM_STATE_DIR", state_default(environ))
    secret, wrong = _key(values)
    findings += wrong
    merged |= secret
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        raise ConfigurationError(*findings, *_findings(error, values)) from None
    findings += cross_checks(settings, str(settings.GLM_STATE_DIR / KEY_FILE))
    findings += _preset_nodes(settings)
    if findings:
        raise ConfigurationError(*findings)
    warnings += [
        f"{key} has no effect with RUNTIME=local"
        for key, field in Settings.model_fields.items()
        if key in chosen and group_of(field) == "Containers" and settings.runtime == "local"
    ]
    return Loaded(settings, chosen, tuple(warnings))


def _preset(name: str) -> tuple[dict[str, Any], list[Finding]]:
    """The values of a preset as defaults."""
    if not name.strip():
        return {}, []
    from glm_launch.nodes import presets

    try:
        found = presets.preset(name.strip())
    except ConfigurationError as error:
        return {}, list(error.findings)
    place: dict[str, Any] = {"RUNTIME": "local", "RANKS": found.ranks_per_node}
    if found.hardware:
        place = {"RUNTIME": "containers", "GPUS_PER_NODE": found.ranks_per_node}
    return place | dict(found.settings), []


def _preset_nodes(settings: Settings) -> list[Finding]:
    """A preset is for a number of nodes."""
    if not settings.PRESET or settings.runtime == "local":
        return []
    from glm_launch.nodes import presets

    wanted = presets.preset(settings.PRESET).nodes
    if wanted == settings.nodes:
        return []
    return [
        Finding(
            "preset-nodes",
            f"PRESET={settings.PRESET} is for {wanted} node(s), HEAD_IP and WORKER_IP name "
            f"{settings.nodes}",
            "its memory and limits are for that number",
            f"name {wanted - 1} worker(s) in WORKER_IP, or choose another preset",
        )
    ]


def _key(values: Mapping[str, _Value]) -> tuple[dict[str, str], list[Finding]]:
    """The API key out of its file; the key itself is never part of a finding."""
    entry = values.get("VLLM_API_KEY_FILE")
    if entry is None:
        return {}, []
    path = Path(entry.text.strip()).expanduser()
    seen = fix = ""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        key, seen = "", f"cannot be read ({getattr(error, 'strerror', None) or 'not text'})"
        fix = "./start.sh key makes one and prints its path"
    else:
        if mode & 0o077:
            seen, fix = f"has mode {mode:04o}", f"chmod 600 {path}"
        elif not key or len(key.split()) != 1:
            seen, fix = "does not hold one key and nothing else", "./start.sh key makes another"
        elif "VLLM_API_KEY" in values:
            seen, fix = "is set, and VLLM_API_KEY is, too", "keep one of them"
    if not seen:
        return {"VLLM_API_KEY": key}, []
    said = f"VLLM_API_KEY_FILE={entry.text} (from {entry.origin}) {seen}"
    return {}, [Finding("bad-key-file", said, "the API would be open or unusable", fix)]


def _from_file(path: Path) -> tuple[dict[str, _Value], list[str], list[Finding]]:
    values: dict[str, _Value] = {}
    warnings: list[str] = []
    findings: list[Finding] = []
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for binding in parse_stream(io.StringIO(text)):
        origin = f"{path.name} line {binding.original.line}"
        if binding.error:
            findings.append(
                Finding("env-syntax", f"{origin} is not KEY=value", "it cannot be read", _HINT)
            )
        elif binding.key in Settings.model_fields:
            if (binding.value or "").strip():
                values[binding.key] = _Value(binding.value or "", origin)
        elif binding.key:
            warnings.append(successors.remark(binding.key, origin, Settings.model_fields))
    return values, warnings, findings


def _findings(error: ValidationError, values: Mapping[str, _Value]) -> list[Finding]:
    found = []
    for detail in error.errors(include_url=False, include_input=False):
        key = str(detail["loc"][0])
        value = values.get(key)
        shown = "(hidden)" if key in SECRET_KEYS else (value.text if value else "(given)")
        origin = f" (from {value.origin})" if value else ""
        message = detail["msg"].removeprefix("Value error, ")
        found.append(
            Finding(
                "bad-setting",
                f"{key}={shown}{origin}: {message[:1].lower()}{message[1:]}",
                Settings.model_fields[key].description or "",
                _HINT,
            )  # fmt: skip
            if key in Settings.model_fields
            else Finding("unknown-setting", f"{key} is not a setting", "nothing reads it", _HINT)
        )
    return found
