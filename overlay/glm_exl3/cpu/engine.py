"""Install the CPU engine into this process: every replaced vLLM name, once.

Called when our platform is instantiated and again by the plug-in; the second call does nothing.
On any other platform it does nothing at all.
"""

from __future__ import annotations

import sys

from glm_exl3.cpu import replacements, table

_state = {"installed": False}


def active() -> bool:
    """Whether vLLM's current platform is ours, without making vLLM resolve it."""
    platforms = sys.modules.get("vllm.platforms")
    current = getattr(platforms, "_current_platform", None)
    return type(current).__module__ == "glm_exl3.cpu.platform" if current is not None else False


def install(*, force: bool = False) -> bool:
    """Install the replacements; True when they are in force afterwards.

    `force` is for the platform itself, which calls this while it is being resolved.
    """
    if not (force or active()):
        return False
    if not _state["installed"]:
        _state["installed"] = True
        replacements.install(table.REPLACEMENTS)
    return True
