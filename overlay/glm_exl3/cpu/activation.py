"""Decide whether this process runs on the CPU platform: entry point of `vllm.platform_plugins`.

What: `platform()` returns the class path of our platform or None. Why this shape: vLLM asks every
platform plug-in in every process, so this must be cheap and must not import torch or vLLM's heavy
modules on a machine with a GPU.

What must stay true: with an accelerator present and nothing asked, it returns None and has no side
effect, so a CUDA process is exactly vLLM's. GLM_EXL3_PLATFORM decides: `cpu` asks for the CPU even
where there is an accelerator, `off` never activates, empty or `auto` activates when none is found.
"""

from __future__ import annotations

import os

from glm_exl3.cpu import accelerator
from glm_exl3.format.errors import GlmExl3Error

PLATFORM_CLASS = "glm_exl3.cpu.platform.CpuEnginePlatform"
VARIABLE = "GLM_EXL3_PLATFORM"
CHOICES = ("auto", "cpu", "off")


def wanted() -> bool:
    """Whether the CPU platform should be active here; raises on an unknown choice."""
    choice = os.environ.get(VARIABLE, "").strip().lower() or "auto"
    if choice not in CHOICES:
        raise GlmExl3Error(
            code="platform-choice",
            seen=f"{VARIABLE}={choice!r}.",
            why=f"The choices are {', '.join(CHOICES)}.",
            fix="Unset it to decide by the hardware, or set one of the choices.",
        )
    if choice == "auto":
        return accelerator.found() is None
    return choice == "cpu"


def platform() -> str | None:
    """Class path of the CPU platform, or None to leave the choice to vLLM."""
    if not wanted():
        return None
    from glm_exl3.cpu import environment, torchvision

    environment.prepare()
    torchvision.prepare()
    return PLATFORM_CLASS
