"""Run one engine configuration in this process and print what it generated, or how it compares.

    python in_process.py JOB.json RESULT.json

The job holds `engine` (keyword arguments of `vllm.LLM`), `prompts`, `max_tokens`, `repeat` (the
same prompts again, to hit the prefix cache) and, to compare, `reference` (the `lines` of an earlier
result). A process of its own per configuration keeps engines from sharing state.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equivalence import Line, compare

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def as_line(output: Any) -> Line:
    tokens = tuple(output.token_ids)
    chosen, margins = [], []
    for token, candidates in zip(tokens, output.logprobs, strict=True):
        ranked = sorted((entry.logprob for entry in candidates.values()), reverse=True)
        chosen.append(candidates[token].logprob)
        margins.append(ranked[0] - ranked[1])
    return Line(tokens, tuple(chosen), tuple(margins))


class Engine:
    """The in-process engine as the `Generate` callable of `equivalence`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        defaults = {
            "enforce_eager": True,
            "seed": 0,
            "max_model_len": 2048,
            "language_model_only": True,
            "disable_log_stats": False,
        }
        self.llm = LLM(**{**defaults, **arguments})

    def __call__(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Line]:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, logprobs=2)
            for length in lengths
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
        return [as_line(output.outputs[0]) for output in outputs]

    def counters(self) -> dict[str, Any]:
        """Prometheus values by name; a counter per draft position becomes a list."""
        found: dict[str, Any] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", getattr(metric, "values", None))
            if value is not None:
                found[metric.name] = value
        return found


def perform(job: dict[str, Any]) -> dict[str, Any]:
    engine = Engine(job["engine"])
    lengths = [job["max_tokens"]] * len(job["prompts"])
    lines = engine(job["prompts"], lengths)
    if job.get("repeat"):
        lines = engine(job["prompts"], lengths)
    result: dict[str, Any] = {"lines": [vars(line) for line in lines]}
    if "reference" in job:
        reference = [Line(**{k: tuple(v) for k, v in line.items()}) for line in job["reference"]]
        result["comparison"] = compare(job["prompts"], reference, engine).as_json()
    return result | {"counters": engine.counters()}


def main() -> None:
    job_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(perform(json.loads(job_path.read_text()))))


if __name__ == "__main__":
    main()
