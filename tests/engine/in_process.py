"""Run one engine configuration in this process and print what it generated, or how it compares.

    python in_process.py JOB.json RESULT.json

The job holds `engine` (keyword arguments of `vllm.LLM`), `prompts`, `max_tokens`, `repeat` (the
same prompts before, to hit the prefix cache), `texts` (token lists to score: mean negative log
probability of each), `draws` (`contexts`, `count`, `tokens`, `temperature`, `top_p`: so many
sampled continuations of each context) and, to compare instead, `reference` (the `lines` of an
earlier result) and `wide_share` (see `equivalence`). A process of its own per configuration keeps
engines from sharing state.
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

    def losses(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Mean negative log probability (nats a token) of each text after its first token."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        inputs = [{"prompt_token_ids": list(text)} for text in texts]
        outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
        found = []
        for text, output in zip(texts, outputs, strict=True):
            scored = zip(text[1:], output.prompt_logprobs[1:], strict=True)
            found.append(-sum(entry[token].logprob for token, entry in scored) / (len(text) - 1))
        return found

    def draws(self, asked: dict[str, Any]) -> list[list[list[int]]]:
        """Sampled continuations, by context."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            n=asked["count"], max_tokens=asked["tokens"], temperature=asked["temperature"],
            top_p=asked["top_p"], ignore_eos=True, detokenize=False,
        )  # fmt: skip
        inputs = [{"prompt_token_ids": context} for context in asked["contexts"]]
        outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
        return [[list(one.token_ids) for one in output.outputs] for output in outputs]

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
    result: dict[str, Any] = {}
    if job.get("repeat"):
        engine(job["prompts"], lengths)
    if "reference" not in job:
        lines = engine(job["prompts"], lengths) if lengths else []
        result["lines"] = [vars(line) for line in lines]
    if "texts" in job:
        result["losses"] = engine.losses(job["texts"])
    if "reference" in job:
        reference = [Line(**{k: tuple(v) for k, v in line.items()}) for line in job["reference"]]
        share = job.get("wide_share", 0.0)
        result["comparison"] = compare(job["prompts"], reference, engine, share).as_json()
    before = engine.counters()
    if "draws" in job:
        result["draws"] = engine.draws(job["draws"])
    return result | {"counters": before if job["prompts"] else engine.counters()}


def main() -> None:
    job_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(perform(json.loads(job_path.read_text()))))


if __name__ == "__main__":
    main()
