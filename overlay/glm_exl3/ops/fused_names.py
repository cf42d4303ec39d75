"""Which decode ops take the place of vLLM's: those named, or what was measured on this kind of GPU.

`GLM_EXL3_FUSED_OPS=auto` stands for the ops of `MEASURED`, by compute capability. An op is there
when it was faster at every number of tokens it takes and left the greedy text of the checkpoints
alone (docs/performance.md, "Fused decode ops"); elsewhere auto means none. `GLM_EXL3_TOGETHER` has
its own table.
"""

from __future__ import annotations

from collections.abc import Mapping

from glm_exl3 import envs

Table = Mapping[tuple[int, int], tuple[str, ...]]
MEASURED: Table = {(9, 0): ("mhc", "kda", "dense", "gate")}
MEASURED_TOGETHER: Table = {(9, 0): envs.TOGETHER_NAMES}
"""NVIDIA H200, 2026-11-30 and 2026-12-01."""


def wanted() -> tuple[str, ...]:
    """Names of the ops of this process, each once; none where the platform is not CUDA."""
    from vllm.platforms import current_platform

    return _resolved(envs.FUSED_OPS, MEASURED) if current_platform.is_cuda() else ()


def together() -> tuple[str, ...]:
    """What shares a launch in this process."""
    return _resolved(envs.TOGETHER, MEASURED_TOGETHER)


def _resolved(knob: envs.Knob, measured: Table) -> tuple[str, ...]:
    """The names of a setting, each once, with those of this GPU for `auto`."""
    asked: tuple[str, ...] = knob.read()
    if envs.AUTO not in asked:
        return asked
    named = tuple(name for name in asked if name != envs.AUTO)
    return tuple(dict.fromkeys((*named, *measured.get(_capability(), ()))))


def _capability() -> tuple[int, int]:
    """Of this process's GPU; zeros where the platform is not CUDA or there is none."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return (found.major, found.minor) if found is not None else (0, 0)
