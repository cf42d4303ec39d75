"""Put the hybrid speculator where vLLM builds a DFlash2 one, and capture every k that is listed.

vLLM's second runner builds speculators in one chain of ifs, without a registry. The first patch
wraps that function: with `GLM_EXL3_HYBRID_DRAFT=1` a DFlash2 drafter gets the subclass, everything
else goes to the original.

vLLM expands a schedule of draft lengths by batch size to a list by batch size and captures graphs
for the lengths in it. A scheduler that picks the length by other signs may use each of them at any
batch size, so the second patch appends all lengths of the schedule behind the largest batch size,
where no scheduler looks and the graph capture does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from glm_exl3.cpu.imports import after_import
from glm_exl3.patches.record import Patch, wrap

SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
INIT = f"{SPECULATORS}:init_speculator"
PROPOSE = f"{SPECULATORS}.dflash.speculator:DFlashSpeculator"
DFLASH2 = f"{SPECULATORS}.dflash2.speculator:DFlash2Speculator"
STATES = "vllm.v1.worker.gpu.states:RequestState"
SCHEDULE_MODULE = "vllm.v1.spec_decode.dynamic.utils"
SCHEDULE = f"{SCHEDULE_MODULE}:build_dynamic_sd_schedule_lookup"
CAPTURE = "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates"


def with_hybrid(original: Callable[..., Any]) -> Callable[..., Any]:
    """`init_speculator` that knows hybrid drafting."""

    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        from glm_exl3 import envs

        config = vllm_config.speculative_config
        if not envs.HYBRID_DRAFT.read() or config.method != "dflash":
            return original(vllm_config, device, req_states)
        if "DFlash2DraftModel" not in (config.draft_model_config.architectures or ()):
            return original(vllm_config, device, req_states)
        from glm_exl3.spec.hybrid import HybridSpeculator

        return HybridSpeculator(vllm_config, device, req_states)

    return init_speculator


def with_every_length(original: Callable[..., Any]) -> Callable[..., Any]:
    """`build_dynamic_sd_schedule_lookup` with all lengths behind the largest batch size."""

    @functools.wraps(original)
    def build(schedule: Any, vllm_max_batch_size: int, vllm_num_speculative_tokens: int) -> Any:
        dense = original(schedule, vllm_max_batch_size, vllm_num_speculative_tokens)
        lengths = {min(int(entry[2]), vllm_num_speculative_tokens) for entry in schedule}
        return dense + sorted(lengths)

    return build


def apply_hybrid() -> None:
    """Wrap `init_speculator` once its module is loaded."""
    holders = ("vllm.v1.worker.gpu.model_runner",)
    after_import(
        SPECULATORS, lambda m: wrap("hybrid-draft", m, "init_speculator", with_hybrid, holders)
    )


def apply_lengths() -> None:
    """Wrap the expansion of the schedule once its module is loaded."""
    name = "build_dynamic_sd_schedule_lookup"
    holders = ("vllm.v1.worker.gpu.cudagraph_utils",)
    after_import(
        SCHEDULE_MODULE, lambda m: wrap("every-draft-length", m, name, with_every_length, holders)
    )


HYBRID = Patch(
    id="hybrid-draft",
    summary="a DFlash2 drafter may be combined with lookup (GLM_EXL3_HYBRID_DRAFT)",
    targets=(INIT, PROPOSE, DFLASH2, STATES),
    stage="import",
    applies_to="==0.33.0",
    fingerprints={
        "0.33.0": {
            INIT: "84ffd4f96cad37a6",
            PROPOSE: "81543c168d981f82",
            DFLASH2: "53e10a27455e87e2",
            STATES: "220ef2ea9f859db0",
        }
    },  # fmt: skip
    upstream="none: upstream has no lookup beside a drafter and no registry of speculators",
    remove_when="vLLM registers speculators of its second runner by name",
    off_switch="GLM_EXL3_PATCH_HYBRID_DRAFT",
    risk="speed: GLM_EXL3_HYBRID_DRAFT has no effect without it",
    apply=apply_hybrid,
)
EVERY_LENGTH = Patch(
    id="every-draft-length",
    summary="graphs are captured for every draft length of a schedule, at any batch size",
    targets=(SCHEDULE, CAPTURE),
    stage="import",
    applies_to="==0.33.0",
    fingerprints={"0.33.0": {SCHEDULE: "809de58e2f8f4dc6", CAPTURE: "2e89c2a443c2f39e"}},
    upstream="none: upstream picks the draft length by batch size only",
    remove_when="vLLM captures the lengths that a scheduler class names",
    off_switch="GLM_EXL3_PATCH_EVERY_DRAFT_LENGTH",
    risk="speed: steps of an uncaptured draft length run without a graph",
    apply=apply_lengths,
)
