"""The shared expert on a stream of its own that starts when routing is done.

vLLM starts it before routing. Its blocks then hold parts of most multiprocessors when the routed
experts come, whose few blocks gather on those that are free first. `GLM_EXL3_SHARED_BESIDE=1` lets
both start together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.envs
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.utils.torch_utils import aux_stream


def shared_call(shared: Any, x: torch.Tensor | None) -> Callable[[], None] | None:
    """What runs the layer's shared experts, whose output vLLM fetches; None without any."""
    if shared is None or x is None:
        return None

    def run() -> None:
        shared(x, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)

    return run


def both(
    routed: Callable[[], torch.Tensor], shared: Callable[[], None] | None, x: torch.Tensor
) -> torch.Tensor:
    """The routed sum; `shared` runs beside it for as many tokens as vLLM would overlap."""
    if shared is None:
        return routed()
    few = x.shape[0] <= vllm.envs.VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
    stream = aux_stream() if x.is_cuda and few else None
    if stream is None:
        shared()
        return routed()
    main = torch.cuda.current_stream()
    stream.wait_stream(main)
    out = routed()
    with torch.cuda.stream(stream):
        shared()
    main.wait_stream(stream)
    return out
