"""Changes to vLLM that no extension point allows: the list, and applying it.

Every patch is one module with one `Patch`. Applying checks the version and the fingerprint of each
target first; unknown source refuses to start, because a patch on code it was not read against may
give wrong answers instead of an error. `GLM_EXL3_ACCEPT_UNKNOWN_VLLM` names patches for which the
operator takes that risk. What must stay true: applying twice equals once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from glm_exl3 import envs
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.log import logger
from glm_exl3.patches import (
    dense_headroom,
    drafting_control,
    fine_window,
    no_store,
    packed_attention,
    pooled_indexer,
    roll_call,
    speculation,
)
from glm_exl3.patches.record import STAGES, Patch

__all__ = ["PATCHES", "Patch", "apply_all", "patch_set"]

PATCHES: tuple[Patch, ...] = (
    packed_attention.PATCH,
    roll_call.PATCH,
    drafting_control.PATCH,
    speculation.HYBRID,
    speculation.EVERY_LENGTH,
    fine_window.PATCH,
    no_store.PATCH,
    pooled_indexer.PATCH,
    dense_headroom.PATCH,
)

_log = logger(__name__)
_applied: set[str] = set()


def apply_all(stage: str, version: str, patches: Sequence[Patch] = PATCHES) -> tuple[str, ...]:
    """Apply the patches of `stage` for vLLM `version`; ids of those applied by this call.

    Raises GlmExl3Error for source that a patch does not know.
    """
    if stage not in STAGES:
        raise ValueError(f"no such stage: {stage}")
    done = []
    for patch in patches:
        if patch.stage != stage or patch.id in _applied:
            continue
        if os.environ.get(patch.off_switch, "") == "0":
            _log.warning("patch %s left out (%s=0)", patch.id, patch.off_switch)
            continue
        _check(patch, version)
        patch.apply()
        _applied.add(patch.id)
        done.append(patch.id)
        _log.info("patch %s applied: %s", patch.id, patch.summary)
    return tuple(done)


def _check(patch: Patch, version: str) -> None:
    drifted = patch.drift(version)
    if not drifted:
        return
    accepted = envs.ACCEPT_PATCHES.read()
    if patch.id in accepted or "all" in accepted:
        _log.warning("patch %s applied to unknown source of %s", patch.id, ", ".join(drifted))
        return
    raise GlmExl3Error(
        code="patch",
        seen=f"patch {patch.id} does not know vLLM {version}'s {', '.join(drifted)}",
        why=f"it was read against {', '.join(patch.fingerprints)}; risk: {patch.risk}",
        fix="use the supported vLLM version, or accept the risk with "
        f"{envs.ACCEPT_PATCHES.name}={patch.id}",
    )


def patch_set(patches: Sequence[Patch] = PATCHES) -> str:
    """Hash over the patches that would be applied; part of the rank digest."""
    active = [p.id for p in patches if os.environ.get(p.off_switch, "") != "0"]
    return hashlib.sha256(" ".join(active).encode()).hexdigest()[:8]
