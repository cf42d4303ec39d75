"""The plugin's knobs: one table with type, default, help and scope.

Every setting that the serving process reads from its environment is a `Knob` here and nowhere else,
so documentation, the doctor and the start line cannot drift from the code. Values are read at each
call: a test or an operator changes the variable, not a cached copy. Variables of the host launcher
(`GLM_*` without `EXL3`) are not listed; they never reach the container.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glm_exl3.format.errors import GlmExl3Error


def _text(value: str) -> str:
    return value.strip()


def _seconds(value: str) -> float:
    seconds = float(value)
    if seconds <= 0:
        raise ValueError("must be greater than 0")
    return seconds


def _names(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _patterns(value: str) -> tuple[str, ...]:
    for pattern in _names(value):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return _names(value)


@dataclass(frozen=True)
class Knob:
    """One environment variable.

    `parse` turns the text into the value and raises ValueError for text that is out of range;
    `scope` says where it must be set: `rank` (each rank may differ) or `all ranks` (must be equal).
    """

    name: str
    default: Any
    parse: Callable[[str], Any]
    help: str
    scope: str = "all ranks"
    choices: tuple[str, ...] = ()

    def read(self, environ: Mapping[str, str] | None = None) -> Any:
        """The typed value, or the default when the variable is unset or empty.

        Raises GlmExl3Error when the text cannot be parsed or is not among the choices.
        """
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text.strip():
            return self.default
        try:
            value = self.parse(text)
        except ValueError as error:
            raise self._invalid(text, str(error)) from error
        if self.choices and value not in self.choices:
            raise self._invalid(text, f"must be one of {', '.join(self.choices)}")
        return value

    def _invalid(self, text: str, reason: str) -> GlmExl3Error:
        return GlmExl3Error(
            code="setting",
            seen=f"{self.name}={text!r}: {reason}",
            why=f"it sets: {self.help}",
            fix=f"set {self.name} to a valid value or unset it (default {self.default!r})",
        )


BACKEND = Knob(
    "GLM_EXL3_BACKEND",
    "auto",
    _text,
    "kernels for packed matrices: auto takes the first back end that can run, a name insists on it",
)
PLATFORM = Knob(
    "GLM_EXL3_PLATFORM",
    "auto",
    _text,
    "embedded CPU engine: auto where no accelerator is found, cpu always, off never",
    choices=("auto", "cpu", "off"),
)
PRESET = Knob("GLM_EXL3_PRESET", "", _text, "name of the launch preset, part of the rank digest")
JOIN_TIMEOUT_S = Knob(
    "GLM_EXL3_JOIN_TIMEOUT_S",
    300.0,
    _seconds,
    "seconds a rank waits for the others before weights are read",
)
IGNORE_TENSORS = Knob(
    "GLM_EXL3_IGNORE_TENSORS",
    (),
    _patterns,
    "comma-separated regular expressions of checkpoint tensors that nobody has to take",
)
ACCEPT_PATCHES = Knob(
    "GLM_EXL3_ACCEPT_UNKNOWN_VLLM",
    (),
    _names,
    "comma-separated patch ids (or all) to apply to vLLM sources with an unknown fingerprint",
)
DIGEST_SALT = Knob(
    "GLM_EXL3_DIGEST_SALT",
    "",
    _text,
    "text mixed into the digest of this rank; exercises the comparison between ranks",
    scope="rank",
)

KNOBS: tuple[Knob, ...] = (
    BACKEND,
    PLATFORM,
    PRESET,
    JOIN_TIMEOUT_S,
    IGNORE_TENSORS,
    ACCEPT_PATCHES,
    DIGEST_SALT,
)


def check_all(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Every knob's value by name. Raises GlmExl3Error for the first that is invalid."""
    return {knob.name: knob.read(environ) for knob in KNOBS}


def as_markdown() -> str:
    """The table for the documentation."""
    rows = [
        f"| `{knob.name}` | `{knob.default!r}` | {knob.scope} | {knob.help} |" for knob in KNOBS
    ]
    return "\n".join(["| variable | default | scope | meaning |", "|---|---|---|---|", *rows])
