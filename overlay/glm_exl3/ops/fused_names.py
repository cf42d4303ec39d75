"""Which decode ops take the place of vLLM's: those named, or what was measured on this kind of GPU.

`GLM_EXL3_FUSED_OPS=auto` stands for the ops of `MEASURED`, by compute capability. An op is there
when it was faster at every number of tokens it takes and left the greedy text of the checkpoints
alone (docs/performance.md, "Fused decode ops"); elsewhere auto means none.
"""

from __future__ import annotations

from glm_exl3 import envs

MEASURED: dict[tuple[int, int], tuple[str, ...]] = {(9, 0): ("mhc", "kda", "dense")}
"""NVIDIA H200, 2026-11-30."""


def wanted() -> tuple[str, ...]:
    """Names of the ops of this process, each once; none where the platform is not CUDA."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return ()
    asked = envs.FUSED_OPS.read()
    if envs.AUTO not in asked:
        return asked
    found = current_platform.get_device_capability()
    measured = MEASURED.get((found.major, found.minor), ()) if found is not None else ()
    named = tuple(name for name in asked if name != envs.AUTO)
    return tuple(dict.fromkeys((*named, *measured)))
