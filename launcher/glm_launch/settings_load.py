"""Read settings from the shell, then `.env`, then the defaults, and report every error at once.

What must stay true: a variable of the shell wins over `.env`; an empty value means "not set"; each
error names the key, where its value came from and what is allowed, and no message holds a secret.
"""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dotenv.parser import parse_stream
from pydantic import ValidationError

from glm_launch.errors import ConfigurationError, Finding
from glm_launch.paths import ENV_FILE, state_default
from glm_launch.settings import Settings, group_of, is_loopback

SECRET_KEYS = frozenset({"VLLM_API_KEY"})
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
    env_file: Path = ENV_FILE,
    overrides: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Loaded:
    """Settings from `overrides`, `environ`, `env_file`, `defaults` and the fields, in that order.

    Raises `ConfigurationError` with one finding per wrong value.
    """
    values, warnings, findings = _from_file(env_file)
    for key in Settings.model_fields:
        if environ.get(key, "").strip():
            values[key] = _Value(environ[key], "shell")
    chosen = frozenset(values)
    merged: dict[str, object] = dict(defaults or {})
    merged |= {key: value.text for key, value in values.items()}
    merged.setdefault("GLM_STATE_DIR", state_default(environ))
    merged |= overrides or {}
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        raise ConfigurationError(*findings, *_findings(error, values)) from None
    findings += cross_checks(settings)
    if findings:
        raise ConfigurationError(*findings)
    warnings += [
        f"{key} has no effect with RUNTIME=local"
        for key, field in Settings.model_fields.items()
        if key in chosen and group_of(field) == "Containers"
    ]
    return Loaded(settings, chosen, tuple(warnings))


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
            warnings.append(_unknown(binding.key, origin))
    return values, warnings, findings


def _unknown(key: str, origin: str) -> str:
    near = difflib.get_close_matches(key, Settings.model_fields, n=1, cutoff=0.7)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{origin}: no setting is called {key}; it is ignored{hint}"


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


def cross_checks(settings: Settings) -> list[Finding]:
    """Combinations that no single field can see."""
    found = []
    if settings.ABLIT:
        found.append(
            Finding(
                "no-weight-edits",
                "ABLIT=1",
                "this version has no weight edits; serving the plain weights would mislead",
                "leave ABLIT empty",
            )
        )
    if not (is_loopback(settings.API_HOST) or settings.VLLM_API_KEY or settings.ALLOW_OPEN_API):
        found.append(
            Finding(
                "open-api",
                f"API_HOST={settings.API_HOST} without VLLM_API_KEY",
                "anybody on that network could use the model and read its metrics",
                "set VLLM_API_KEY=..., or ALLOW_OPEN_API=1 where the network is trusted",
            )
        )
    if settings.WORKER_IP:
        found.append(
            Finding(
                "remote-nodes",
                f"WORKER_IP={','.join(settings.WORKER_IP)} with RUNTIME=local",
                "RUNTIME=local starts every rank on this machine",
                "leave WORKER_IP empty; RANKS says how many ranks to start here",
            )
        )
    if settings.PORT == settings.MASTER_PORT:
        found.append(
            Finding(
                "same-port",
                f"PORT and MASTER_PORT are both {settings.PORT}",
                "the API and the meeting point of the ranks need a port each",
                "change one of them",
            )  # fmt: skip
        )
    if settings.DFLASH_DRAFT_TP not in (0, 1, settings.RANKS):
        found.append(
            Finding(
                "draft-tp",
                f"DFLASH_DRAFT_TP={settings.DFLASH_DRAFT_TP} with RANKS={settings.RANKS}",
                "vLLM runs a drafter on one rank or on all",
                f"use 0, 1 or {settings.RANKS}",
            )  # fmt: skip
        )
    return found
