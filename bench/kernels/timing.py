"""Time of device work: medians over replays of one captured graph.

A graph holds one call per input set, so that no replay meets weights which the cache still holds
from the call before, and launch gaps of the host do not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Warm every call up twice on a side stream, then capture all of them in order."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def median_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Microseconds of one call, from `replays` replays of a graph of all `calls`."""
    graph = graph_of(calls)
    for _ in range(2):
        graph.replay()
    times: list[float] = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000.0 / len(calls))
    return float(statistics.median(times))


def copy_gbps(size_bytes: int = 1 << 32) -> float:
    """Device-to-device copy rate of an elementwise kernel, bytes read plus written, GB/s."""
    source = torch.zeros(size_bytes // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    copy_us: float = median_us([lambda: torch.neg(source, out=target)])
    return 2 * size_bytes / copy_us / 1000.0
