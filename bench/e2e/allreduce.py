"""What the all-reduce of a step takes by each of vLLM's ways, between the ranks of one engine.

Every rank calls `rows` at the same point. Calls are timed inside CUDA graphs that are captured as
vLLM captures its own (`graph_capture` makes the buffers known to the other ranks), or one by one
where a rank could not capture. The ranks agree before a size is begun and before anything is
replayed, so that none waits for a peer that gave up.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Protocol

HIDDEN = 4096
TOKENS = (1, 8, 16, 8192)
CALLS = 20
REPEATS = 15
WARM_UP = 3
WORDS = 300
Call = Callable[[], Any]
Ways = list[tuple[str, Call | None]]


class Clock(Protocol):
    """Times a call; `agreed` says whether something went well on every rank."""

    def __call__(self, call: Call) -> dict[str, Any]: ...

    def agreed(self, good: bool) -> bool: ...


def choices(communicator: Any, values: Any) -> Ways:
    """vLLM's ways for `values` (bf16 [tokens, hidden]) by name; None where one does not take it.

    Where vLLM has no NCCL of its own it falls back to that of torch's process group.
    """
    import torch

    custom, nccl = communicator.ca_comm, communicator.pynccl_comm
    out = values.clone()
    ours = custom is not None and custom.should_custom_ar(values)

    def by_nccl() -> None:
        if nccl is not None and not nccl.disabled:
            nccl.all_reduce(values, out)
        else:
            torch.distributed.all_reduce(out, group=communicator.device_group)

    return [
        ("custom", (lambda: custom.custom_all_reduce(values)) if ours else None),
        ("nccl", by_nccl),
    ]


def measure(communicator: Any, make: Callable[[int], Any], clock: Clock) -> list[dict[str, Any]]:
    """A row per size and way; `make` gives the values of so many tokens."""
    found: list[dict[str, Any]] = []
    for tokens in TOKENS:
        ways, problem = Ways(), "a peer had no memory for this size"
        try:
            ways = choices(communicator, make(tokens))
        except Exception as error:  # noqa: BLE001 - the peers have to know before they begin
            problem = f"{error!r}"[:WORDS]
        if not clock.agreed(bool(ways)):
            found.append({"kind": "allreduce", "tokens": tokens, "error": problem})
            continue
        for choice, call in ways:
            row = {"kind": "allreduce", "tokens": tokens, "choice": choice, "us": None}
            try:
                row |= clock(call) if call else {"left_out": "not for this size, or switched off"}
            except Exception as error:  # noqa: BLE001 - the next row may still work
                row["error"] = f"{error!r}"[:WORDS]
            found.append(row)
    return found


class GraphClock:
    """Times calls that all ranks of a tensor-parallel group make alike."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def agreed(self, good: bool) -> bool:
        """Whether it went well on every rank."""
        import torch

        flag = torch.tensor(int(good))
        torch.distributed.all_reduce(
            flag, op=torch.distributed.ReduceOp.MIN, group=self.group.cpu_group
        )
        return bool(flag.item())

    def captured(self, call: Call) -> tuple[Any, str]:
        """A graph of CALLS calls, or what kept it from being captured."""
        import torch
        from vllm.distributed.parallel_state import graph_capture

        graph = torch.cuda.CUDAGraph()
        try:
            with (
                graph_capture(device=self.group.device) as context,
                torch.cuda.graph(graph, stream=context.stream),
            ):
                for _ in range(CALLS):
                    call()
        except Exception as error:  # noqa: BLE001 - timed without a graph then
            return None, f"{error!r}"[:WORDS]
        return graph, ""

    def __call__(self, call: Call) -> dict[str, Any]:
        """Median microseconds of one call."""
        import torch

        call()
        torch.cuda.synchronize()
        graph, problem = self.captured(call)
        if self.agreed(graph is not None):
            return {"us": median_us(graph.replay), "graph": True}

        def eager() -> None:
            for _ in range(CALLS):
                call()

        return {"us": median_us(eager), "graph": False, "not_captured": problem}


def median_us(batch: Call) -> float:
    """Microseconds per call of a `batch` of CALLS calls; every rank runs as many batches."""
    import torch

    for _ in range(WARM_UP):
        batch()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for start, stop in pairs:
        start.record()
        batch()
        stop.record()
    torch.cuda.synchronize()
    times = [1000 * start.elapsed_time(stop) / CALLS for start, stop in pairs]
    return round(float(statistics.median(times)), 2)


def rows() -> list[dict[str, Any]]:
    """The rows of this process's tensor-parallel group.

    Raises AssertionError in a process without one.
    """
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()

    def make(tokens: int) -> Any:
        return torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=group.device)

    return measure(group.device_communicator, make, GraphClock(group))
