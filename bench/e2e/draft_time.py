"""Milliseconds a step spends on drafting and selecting, at real dims, one request, seven drafts.

    python -m e2e.draft_time [DRAFTER] --out RESULT.json [--layers 8] [--steps 64] [--profile]

DRAFTER is a packed drafter for a target of so many layers, as `e2e.draft_pack` leaves one; without
it one of random weights is written. The target in front of it is cut to its first layers and loads
random weights; embedding, head and the drafter itself have the real dims, so what is timed is what
a real step drafts. Time is measured by events on the GPU's stream around the
speculator's `propose`: key and value projections of the context, the block, candidates, selection.
The median over the steps of one request after warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGET_MS = 1.0
TOKENS = 7
WARM_UP = 8


def speculator_of(llm: Any) -> Any:
    """The speculator of the engine in this process."""
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner.speculator


class Stopwatch:
    """Wraps `propose` with events on the current stream."""

    def __init__(self, speculator: Any) -> None:
        import torch

        self.pairs: list[tuple[Any, Any]] = []
        self.active = False
        propose = speculator.propose

        def timed(*arguments: Any, **named: Any) -> Any:
            if not self.active:
                return propose(*arguments, **named)
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            pair[0].record()
            drafts = propose(*arguments, **named)
            pair[1].record()
            self.pairs.append(pair)
            return drafts

        speculator.propose = timed

    def milliseconds(self) -> list[float]:
        import torch

        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in self.pairs]


def write_models(options: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """The cut target, and the given drafter or a packed one whose taps are layers of that target.

    Both are headers in FOLDER for the loader `exl3_dummy`.
    """
    from glm_exl3.dummy.cli import main as write_dummy

    target, drafter = folder / "target", options.drafter or folder / "drafter"
    asked = ["--family", "full", "--out", str(target), "--layers", str(options.layers)]
    asked += ["--experts", str(options.experts)]
    write_dummy(asked if options.drafter else [*asked, "--drafter", str(drafter)])
    return target, drafter


def measure(options: argparse.Namespace, target: Path, drafter: Path) -> dict[str, Any]:
    """Medians by number of requests."""
    import torch

    from e2e.inside import Bench

    bench = Bench(
        {
            "model": str(target),
            "load_format": "exl3_dummy",
            "language_model_only": True,
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "gpu_memory_utilization": 0.5,
            "speculative_config": {
                "method": "dflash",
                "model": str(drafter),
                "num_speculative_tokens": TOKENS,
            },
        }
    )
    watch = Stopwatch(speculator_of(bench.llm))
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "by_requests": {}}
    for requests in options.requests:
        bench.run(requests, options.context, WARM_UP)
        watch.pairs.clear()
        watch.active = True
        bench.run(requests, options.context, options.steps)
        watch.active = False
        times = watch.milliseconds()[WARM_UP:]
        result["by_requests"][requests] = {
            "median_ms": round(statistics.median(times), 4),
            "worst_ms": round(max(times), 4),
            "steps": len(times),
        }
    result["draft_ms"] = result["by_requests"][options.requests[0]]["median_ms"]
    if options.profile:
        result["profile"] = bench.profile(1, options.context, 16)["families"]
    return result


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m e2e.draft_time")
    made.add_argument("drafter", type=Path, nargs="?")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--experts", type=int, default=16)
    made.add_argument("--context", type=int, default=1024)
    made.add_argument("--steps", type=int, default=64)
    made.add_argument("--requests", type=lambda t: [int(n) for n in t.split(",")], default=[1])
    made.add_argument("--profile", action="store_true")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure once; 1 when the target was missed."""
    options = parser().parse_args(arguments)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, *write_models(options, Path(folder)))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.profile:
        print("microseconds of a step, target included:", json.dumps(result["profile"]))
    print(f"draft and selection: {result['draft_ms']} ms a step, target {TARGET_MS} ms")
    return int(result["draft_ms"] > TARGET_MS)


if __name__ == "__main__":
    sys.exit(main())
