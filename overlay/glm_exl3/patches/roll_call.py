"""Call the roll before ranks of several nodes form a process group.

vLLM's head waits for its nodes inside torch's rendezvous, for up to half an hour and without a
word. A node that lacks the plugin stops by itself, since it does not know `exl3`; the head would go
on waiting. The worker calls `init_distributed_environment` by a name it imported; the patch wraps
that function and first lets the ranks find each other with a bounded wait and compare their
digests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from glm_exl3.patches.record import Patch, wrap

INIT = "vllm.distributed.parallel_state:init_distributed_environment"
WORKER = "vllm.v1.worker.gpu_worker:init_worker_distributed_environment"
_HOLDERS = ("vllm.distributed", "vllm.v1.worker.gpu_worker")


def needs_roll_call(parallel: Any, world_size: int) -> bool:
    """Whether ranks sit on several nodes; data-parallel groups would meet at one address."""
    return parallel.nnodes > 1 and world_size > 1 and parallel.data_parallel_size == 1


def with_roll_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """`init_distributed_environment` behind a roll call where the launch spans several nodes."""

    @functools.wraps(original)
    def init(world_size: int = -1, rank: int = -1, *args: Any, **kwargs: Any) -> Any:
        from vllm.config import get_current_vllm_config_or_none

        from glm_exl3.quant.rollcall import Meeting, call

        config = get_current_vllm_config_or_none()
        parallel = None if config is None else config.parallel_config
        if parallel is not None and needs_roll_call(parallel, world_size):
            call(Meeting(parallel.master_addr, parallel.master_port, rank, world_size))
        return original(world_size, rank, *args, **kwargs)

    return init


def apply() -> None:
    """Wrap the function wherever loaded modules hold it."""
    from vllm.distributed import parallel_state

    wrap("roll-call", parallel_state, "init_distributed_environment", with_roll_call, _HOLDERS)


PATCH = Patch(
    id="roll-call",
    summary="ranks of several nodes wait a bounded time for each other and compare digests",
    targets=(INIT, WORKER),
    stage="import",
    applies_to="==0.33.0",
    fingerprints={"0.33.0": {INIT: "774807c3972ea134", WORKER: "e35eeed99d290873"}},
    upstream="none: upstream leaves a missing node to the rendezvous timeout",
    remove_when="vLLM names missing nodes within a set time and compares plugins",
    off_switch="GLM_EXL3_PATCH_ROLL_CALL",
    risk="hang: a node without the plugin keeps the head waiting",
    apply=apply,
)
