"""Ways of drafting that are compared with none, and one engine run of each.

A row is a method with its lengths, environment and further keys of vLLM's speculative
configuration. Every run is an engine in a process of its own (`tests/engine/in_process.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "bench" / "nano" / "model"
PANEL = ROOT / "tests" / "bench" / "nano_panel.json"
RUN = ROOT / "tests" / "engine" / "in_process.py"
ADAPTIVE = "glm_exl3.spec.adaptive.AdaptiveScheduler"
HYBRID = {"GLM_EXL3_HYBRID_DRAFT": "1"}
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One way of drafting; two or more lengths take the adaptive scheduler."""

    method: str = "dflash"
    lengths: tuple[int, ...] = (7,)
    environment: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False


ROWS = {
    "none": Row("none", ()),
    "mtp": Row("mtp", (2,)),
    "dflash": Row(),
    "dflash-packed": Row(packed=True),
    "hybrid": Row(environment=HYBRID),
    "hybrid-15": Row(lengths=(15,), environment=HYBRID),
    "adaptive": Row(lengths=(2, 4, 7)),
    "hybrid-adaptive": Row(lengths=(2, 4, 7, 15), environment=HYBRID),
    "hybrid-eager": Row(
        environment={**HYBRID, "GLM_EXL3_HYBRID_MATCH": "1"},
        more={"draft_sample_method": "probabilistic"},
    ),
    "planted": Row(
        more={
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.9**place for place in range(1, 8)],
        }
    ),
}
"""`hybrid-eager` looks up after one matching token, with proposal probabilities; `planted` accepts
nine of ten drafts whatever the target says (GPUs only)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every program with these engines takes."""
    parser.add_argument("--model", type=Path, default=MODEL / "full-4bpw")
    parser.add_argument("--drafter", type=Path, default=MODEL / "drafter")
    parser.add_argument("--packed", type=Path, default=MODEL / "drafter-6bpw")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--memory-gib", type=float, default=0.0, help="of the KV cache; 0: vLLM's")
    parser.add_argument("--batch", type=int, default=64, help="requests at once")


def shared_memory(gib: float) -> dict[str, Any]:
    """Engine arguments for so much KV cache on a GPU that others use, too; 0: vLLM's own choice."""
    if not gib:
        return {}
    return {"kv_cache_memory_bytes": int(gib * GIB), "gpu_memory_utilization": 0.1}


def arguments(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for `row`."""
    made: dict[str, Any] = {
        "model": str(options.model.resolve()),
        "limit_mm_per_prompt": {"image": 0, "video": 0},
        "enforce_eager": options.eager,
        "max_num_seqs": options.batch,
        **shared_memory(options.memory_gib),
    }
    if row.method == "none":
        return made
    speculation = speculative(row, options.packed if row.packed else options.drafter)
    if len(row.lengths) > 1:
        speculation["num_speculative_tokens_per_batch_size"] = schedule(row.lengths)
        made["scheduler_cls"] = ADAPTIVE
    return made | {"speculative_config": speculation | dict(row.more)}


def schedule(lengths: Sequence[int]) -> list[list[int]]:
    """vLLM's schedule that names `lengths`, so that their graphs are captured."""
    return [[count, count, length] for count, length in enumerate(lengths, start=1)]


def speculative(row: Row, drafter: Path) -> dict[str, Any]:
    """Method, model and most tokens of vLLM's speculative configuration."""
    made: dict[str, Any] = {"method": row.method, "num_speculative_tokens": row.lengths[-1]}
    return made | ({"model": str(drafter.resolve())} if row.method == "dflash" else {})


def run(name: str, options: argparse.Namespace, **job: Any) -> dict[str, Any]:
    """What the engine of the row `name` makes of `job`. Raises CalledProcessError."""
    engine = arguments(ROWS[name], options) | {"seed": list(ROWS).index(name)}
    return perform({"engine": engine, **job}, ROWS[name].environment)


def perform(job: dict[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What `in_process.py` makes of `job`. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "job.json"), Path(folder, "result.json")
        given.write_text(json.dumps(job))
        paths = (ROOT / "overlay", RUN.parent, os.environ.get("PYTHONPATH", ""))
        env = {**os.environ, **(environment or {})}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, map(str, paths)))
        subprocess.run([sys.executable, str(RUN), str(given), str(made)], check=True, env=env)
        found: dict[str, Any] = json.loads(made.read_text())
        return found


def accepted(counters: Mapping[str, Any]) -> float:
    """Accepted drafts per verify step of a request."""
    steps = counters.get("vllm:spec_decode_num_drafts", 0)
    return counters["vllm:spec_decode_num_accepted_tokens"] / steps if steps else 0.0
