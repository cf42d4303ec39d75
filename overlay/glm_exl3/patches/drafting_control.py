"""Let the API server reach the scheduler's drafting.

The scheduler lives in the engine's process. vLLM carries utility calls there, by the name of a
method of `EngineCore`, and has none for the scheduler's draft length. The patch adds one method and
changes none; the call runs between two steps, as all utility calls do.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from glm_exl3.cpu.imports import after_import
from glm_exl3.patches.record import Patch

CORE_MODULE = "vllm.v1.engine.core"
DISPATCH = f"{CORE_MODULE}:EngineCoreProc._handle_client_request"
CONVERT = f"{CORE_MODULE}:EngineCoreProc._convert_msgspec_args"


def drafting(self: Any, options: dict | None = None) -> dict[str, Any]:
    """The state of adaptive k, after changing what `options` names.

    `unavailable` and `invalid` hold what is wrong instead of an exception, which would travel as
    text.
    """
    scheduler = self.scheduler
    if not hasattr(scheduler, "retune"):
        return {"unavailable": "ADAPTIVE_K is off: this launch has one draft length"}
    try:
        state: dict[str, Any] = scheduler.retune(options) if options else scheduler.drafting()
    except (TypeError, ValueError) as error:
        return {"invalid": str(error)}
    return state


def _add(module: ModuleType) -> None:
    if not hasattr(module.EngineCore, "glm_exl3_drafting"):
        module.EngineCore.glm_exl3_drafting = drafting


def apply() -> None:
    """Add the method once the engine's module is loaded."""
    after_import(CORE_MODULE, _add)


PATCH = Patch(
    id="drafting-control",
    summary="the engine answers a utility call that shows and changes adaptive k",
    targets=(DISPATCH, CONVERT),
    stage="import",
    applies_to="==0.33.0",
    fingerprints={"0.33.0": {DISPATCH: "883d5b1cdeac1180", CONVERT: "9913d3ed167282da"}},
    upstream="none: upstream schedules the draft length by batch size and does not change it",
    remove_when="vLLM lets plugins add utility calls",
    off_switch="GLM_EXL3_PATCH_DRAFTING_CONTROL",
    risk="crash: /v1/drafting fails without it",
    apply=apply,
)
