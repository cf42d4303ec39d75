"""How a setting is defined: a pydantic field with its help, group and scope."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

Group = Literal[
    "Model", "Drafting", "API", "Nodes", "Capacity", "Images and video", "Weight edits",
    "Containers", "Operation",
]  # fmt: skip
Scope = Literal["host", "head", "all ranks"]


def setting(
    default: Any, help_text: str, group: Group, scope: Scope, *, basic: bool = False, **limits: Any
) -> Any:
    """A field with its help, group and scope; `basic` ones are active in .env.example."""
    extra: dict[str, Any] = {"group": group, "scope": scope, "basic": basic}
    return Field(default, description=help_text, json_schema_extra=extra, **limits)
