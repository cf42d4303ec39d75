"""Render `.env.example` and docs/configuration.md from the fields of `Settings`.

    python -m glm_launch.settings_pages          # writes both
    python -m glm_launch.settings_pages --check  # exit 1 when one of them is stale

The text is a pure function of the fields; a test compares it with the committed files.
"""

from __future__ import annotations

import re
import sys
import typing
from pathlib import Path
from typing import Any, Literal, get_args

from annotated_types import Ge, Le
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from glm_launch.paths import ENV_EXAMPLE, REPOSITORY
from glm_launch.settings import Settings, group_of, metadata
from glm_launch.settings_field import Group

CONFIGURATION_PAGE = REPOSITORY / "docs" / "configuration.md"
_GROUPS: tuple[str, ...] = get_args(Group)


def default_text(field: FieldInfo) -> str:
    """The default as one would write it in `.env`; empty for "not set"."""
    value = field.default
    if value is None or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def allowed_text(field: FieldInfo) -> str:
    """Type and range in words."""
    annotation: Any = field.annotation
    bounds = field.metadata
    words = "text"
    if typing.get_origin(annotation) is Literal:
        return " \\| ".join(str(choice) for choice in get_args(annotation))
    if annotation is bool:
        return "0 \\| 1"
    if annotation in (int, float):
        words = "whole number" if annotation is int else "number"
        low = next((limit.ge for limit in bounds if isinstance(limit, Ge)), None)
        high = next((limit.le for limit in bounds if isinstance(limit, Le)), None)
        words += f" {low} to {high}"
    elif SecretStr in get_args(annotation):
        words = "text, secret"
    elif annotation is Path:
        words = "folder"
    elif typing.get_origin(annotation) is tuple:
        words = "list"
    elif typing.get_origin(annotation) is dict:
        words = "name=number list"
    return words


def by_group() -> dict[str, list[tuple[str, FieldInfo]]]:
    """Fields by group, both in the order of definition."""
    return {
        group: [
            (name, field)
            for name, field in Settings.model_fields.items()
            if group_of(field) == group
        ]
        for group in _GROUPS
    }


def render_env_example() -> str:
    """The file a user copies to `.env`."""
    lines = [
        "# Copy to .env and edit. A variable of the shell wins over this file; an empty value",
        "# means the default. Generated from launcher/glm_launch/settings.py.",
    ]
    for fields in by_group().values():
        basic = [(name, field) for name, field in fields if metadata(field)["basic"]]
        for name, field in basic:
            default = default_text(field)
            said = f" (default {default})" if default else ""
            lines += ["", f"# {field.description}{said}", f"{name}="]
    lines += ["", "# Less often needed; docs/configuration.md explains them."]
    for fields in by_group().values():
        lines += [
            f"#{name}={default_text(field)}"
            for name, field in fields
            if not metadata(field)["basic"]
        ]
    return "\n".join(lines) + "\n"


def render_configuration() -> str:
    """The reference page."""
    lines = [
        "# Configuration",
        "",
        "Generated from `launcher/glm_launch/settings.py`. `./start.sh` reads the shell, then",
        "`.env`, then the defaults below. All errors are told at once, with exit code 2, before",
        "anything is touched. *Scope* says where a value takes effect.",
    ]
    for group, fields in by_group().items():
        lines += ["", f"## {group}", "", "| setting | allowed | default | scope | meaning |"]
        lines.append("|---|---|---|---|---|")
        for name, field in fields:
            default = default_text(field)
            lines.append(
                f"| `{name}` | {allowed_text(field)} | {f'`{default}`' if default else 'empty'} "
                f"| {metadata(field)['scope']} | {field.description} |"
            )
    return re.sub(r"[ \t]+\n", "\n", "\n".join(lines) + "\n")


PAGES = {ENV_EXAMPLE: render_env_example, CONFIGURATION_PAGE: render_configuration}


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` tell which are stale."""
    stale = []
    for path, render in PAGES.items():
        text = render()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.name)
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    if stale and "--check" in arguments:
        sys.stderr.write(f"stale: {', '.join(stale)}; run python -m glm_launch.settings_pages\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
