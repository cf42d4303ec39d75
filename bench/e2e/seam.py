"""Time the fused mHC seam against vLLM's own operation and check it against `ref`.

    python -m e2e.seam RESULT.json

Each figure is the time of one call inside a CUDA graph of many calls over different weights, so
that `fn` comes from memory as it does in a decode step.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

HIDDEN, LAYERS, ROUNDS = 4096, 90, 7


def inputs(tokens: int) -> dict[str, Any]:
    """Random tensors of one decode step; `fn` differs per call."""
    random = torch.Generator("cuda").manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=random)

    return {
        "x": normal(tokens, HIDDEN).bfloat16(),
        "streams": normal(tokens, 4, HIDDEN).bfloat16(),
        "post": normal(tokens, 4, 1).sigmoid() * 2,
        "comb": normal(tokens, 4, 4).softmax(-1),
        "fns": [normal(24, 4 * HIDDEN) * 0.005 for _ in range(LAYERS)],
        "scale": normal(3).abs() + 0.5,
        "base": normal(24) * 0.5,
        "norm": (1 + 0.1 * normal(HIDDEN)).bfloat16(),
    }


def graph_us(call: Callable[[Any], Any], fns: list[Any]) -> float:
    """Microseconds of one call."""
    for fn in fns[:3]:
        call(fn)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for fn in fns:
            call(fn)
    times = []
    for _ in range(ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop) / len(fns))
    return statistics.median(times)


def measure(tokens: int) -> dict[str, Any]:
    """Errors against the reference and both times for `tokens` tokens."""
    import vllm.model_executor.kernels.mhc  # noqa: F401 - registers the operation

    from glm_exl3.fused import mhc_seam
    from glm_exl3.ref import mhc

    data = inputs(tokens)
    parameters = mhc.HyperParameters(1e-5, 1e-6, 1e-6, 2.0, 20)
    common = [data["x"], data["streams"], data["post"], data["comb"]]

    def ours(fn: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = (data["scale"], data["base"], parameters, data["norm"], 1e-5)
        return mhc_seam.seam(*common, fn, *rest)

    def theirs(fn: torch.Tensor) -> tuple[torch.Tensor, ...]:
        numbers = (1e-5, 1e-6, 1e-6, 2.0, 20, 1, 1)
        operation = torch.ops.vllm.mhc_fused_post_pre_tilelang
        return operation(*common, fn, data["scale"], data["base"], *numbers, data["norm"], 1e-5)

    fn = data["fns"][0]
    streams = mhc.expand(*common)
    pre, post, comb = mhc.mixing_weights(streams, fn, data["scale"], data["base"], parameters)
    wanted = (streams, post, comb, mhc.collapse(streams, pre, data["norm"], 1e-5))
    row: dict[str, Any] = {"tokens": tokens}
    for name, call in (("ours", ours), ("vllm", theirs)):
        found = call(fn)
        row[f"{name}_error"] = [
            float((a.float() - b.float()).norm() / b.float().norm())
            for a, b in zip(found, wanted, strict=True)
        ]
        row[f"{name}_us"] = graph_us(call, data["fns"])
    return row


def measure_each(
    measured: Callable[[int], dict[str, Any]], counts: Iterable[int], out: Path
) -> None:
    """Print a row per token count and keep all rows in `out` after each."""
    rows = []
    for tokens in counts:
        rows.append(measured(tokens))
        out.write_text(json.dumps(rows))
        print(rows[-1], flush=True)


def main() -> None:
    from glm_exl3.fused import mhc_seam

    measure_each(measure, range(1, mhc_seam.MAX_TOKENS + 1), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
