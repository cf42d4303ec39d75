"""Time the fused mHC seams against vLLM's own operation and check them against `ref`.

    python -m e2e.seam RESULT.json

Each figure is the time of one call inside a CUDA graph of many calls over different weights, so
that `fn` comes from memory as it does in a decode step. A row holds what there is of

    cuda       the CUDA kernel as it is used, each call launched while the last one runs
    cuda_late  the same, each launched when the last one has ended
    cuda_half  in half as many blocks of twice the columns
    triton     the Triton kernel, up to its two tokens
    vllm       vLLM's two launches
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from glm_exl3.envs import EARLY_LAUNCH
from glm_exl3.ref import mhc

HIDDEN, LAYERS, ROUNDS = 4096, 90, 7
LATE = {EARLY_LAUNCH.name: "0"}
PARAMETERS = mhc.HyperParameters(1e-5, 1e-6, 1e-6, 2.0, 20)


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


def ways(data: dict[str, Any], tokens: int) -> dict[str, Callable[[torch.Tensor], Any]]:
    """What makes a seam of `fn` here, by name."""
    import vllm.model_executor.kernels.mhc  # noqa: F401 - registers the operation

    from glm_exl3.fused import seam_cuda, seam_triton

    common = [data[name] for name in ("x", "streams", "post", "comb")]
    rest = (data["scale"], data["base"], PARAMETERS, data["norm"], 1e-5)

    def theirs(fn: torch.Tensor) -> Any:
        numbers = (1e-5, 1e-6, 1e-6, 2.0, 20, 1, 1)
        operation = torch.ops.vllm.mhc_fused_post_pre_tilelang
        return operation(*common, fn, data["scale"], data["base"], *numbers, data["norm"], 1e-5)

    found: dict[str, Callable[[torch.Tensor], Any]] = {}
    if seam_cuda.has_kernel(data["x"].device):
        found["cuda"] = found["cuda_late"] = lambda fn: seam_cuda.seam(*common, fn, *rest)
        half = HIDDEN // 512
        found["cuda_half"] = lambda fn: seam_cuda.seam(*common, fn, *rest, blocks=half)
    if tokens <= seam_triton.MAX_TOKENS:
        found["triton"] = lambda fn: seam_triton.seam(*common, fn, *rest)
    return found | {"vllm": theirs}


def measure(tokens: int) -> dict[str, Any]:
    """Errors against the reference and times of all ways for `tokens` tokens."""
    data = inputs(tokens)
    fn = data["fns"][0]
    streams = mhc.expand(*(data[name] for name in ("x", "streams", "post", "comb")))
    pre, post, comb = mhc.mixing_weights(streams, fn, data["scale"], data["base"], PARAMETERS)
    wanted = (streams, post, comb, mhc.collapse(streams, pre, data["norm"], 1e-5))
    torch.cuda.synchronize()
    row: dict[str, Any] = {"tokens": tokens}
    for name, call in ways(data, tokens).items():
        with patch.dict(os.environ, LATE if name == "cuda_late" else {}):
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
