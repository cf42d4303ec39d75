"""Measure one engine configuration inside its own process: step times, prefill, profile.

    python -m e2e.inside JOB.json RESULT.json
    python -m torch.distributed.run --nproc-per-node 2 -m e2e.inside JOB.json RESULT.json

The second runs one process per rank of a tensor-parallel engine
(`distributed_executor_backend: external_launcher`); the first rank writes.

The job holds `engine` (keyword arguments of `vllm.LLM`) and `measure`, a list of
`{"kind": "decode", "requests": n, "context": tokens, "tokens": steps}`, `{"kind": "prefill",
"context": tokens}`, `{"kind": "together", "requests": n, "context": tokens, "tokens": steps}`,
`{"kind": "profile", "requests": n, "context": tokens, "tokens": steps}` and
`{"kind": "allreduce"}`, which gives several rows (`e2e.allreduce`). With `"drafts": k` a
measurement verifies k drafts in every step (an engine of the adaptive scheduler that captured k).
Prompts are random ids, all different. The result is written after every measurement, so a later
failure loses nothing.

Decode time is that of the request that started last: from its first token on all run together.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from e2e.families import KernelTime, Span, by_family, wall_shares

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LOWEST_ID = 64
WARM_PREFILL = 16384
PROFILE_ROWS = 60
TIMELINE_STEP = 1  # the step of a profile whose kernels are kept one by one


class Bench:
    """The engine and a source of prompts."""

    def __init__(self, engine: dict[str, Any]) -> None:
        from vllm import LLM

        started = time.perf_counter()
        self.llm = LLM(**{"disable_log_stats": False, "enable_prefix_caching": False, **engine})
        self.start_s = time.perf_counter() - started
        self.random = random.Random(0)
        self.vocabulary = self.llm.model_config.get_vocab_size()

    def prompt(self, length: int) -> dict[str, list[int]]:
        """A prompt nobody has seen."""
        ids = [self.random.randrange(LOWEST_ID, self.vocabulary) for _ in range(length)]
        return {"prompt_token_ids": ids}

    def parameters(self, tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)

    def run(self, requests: int, context: int, tokens: int) -> tuple[list[Any], float]:
        """Outputs and seconds of one batch."""
        prompts = [self.prompt(context) for _ in range(requests)]
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, self.parameters(tokens), use_tqdm=False)
        return outputs, time.perf_counter() - started

    def verify(self, drafts: int) -> None:
        """Verify `drafts` in every step from now on. Raises ValueError if not captured."""
        self.llm.llm_engine.engine_core.engine_core.scheduler.retune({"lengths": [drafts]})

    def drafts(self) -> float:
        """How many verify steps all requests together have had."""
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:spec_decode_num_drafts":
                return float(metric.value)
        return 0.0

    def decode(self, requests: int, context: int, tokens: int) -> dict[str, Any]:
        """Milliseconds per step with all requests running."""
        self.run(requests, context, 4)
        before = self.drafts()
        outputs, seconds = self.run(requests, context, tokens)
        last = min(outputs, key=lambda o: o.metrics.last_token_ts - o.metrics.first_token_ts)
        span = last.metrics.last_token_ts - last.metrics.first_token_ts
        drafts = (self.drafts() - before) / requests
        steps = drafts or tokens - 1
        return {
            "step_ms": 1000 * span / steps,
            "steps": steps,
            "tokens_per_step": (tokens - 1) / steps,
            "batch_tokens_per_s": requests * (tokens - 1) / span,
            "seconds": seconds,
        }

    def prefill(self, requests: int, context: int, tokens: int) -> dict[str, Any]:
        """Seconds from prompt to first token, cold."""
        self.run(1, min(context, WARM_PREFILL), 1)
        _, seconds = self.run(1, context, 1)
        return {"seconds": seconds, "tokens_per_s": context / seconds}

    def together(self, requests: int, context: int, tokens: int) -> dict[str, Any]:
        """Seconds until all of `requests` are done that start together, and how many were evicted
        meanwhile: none where all of them fit."""
        outputs, seconds = self.run(requests, context, tokens)
        metrics = (m for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")
        evicted = sum(int(metric.value) for metric in metrics)
        return {"seconds": seconds, "finished": len(outputs), "preemptions": evicted}

    def profile(self, requests: int, context: int, tokens: int) -> dict[str, Any]:
        """GPU time of every kernel over `tokens` steps, without the prefill."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        engine = self.llm.llm_engine
        for index in range(requests):
            engine.add_request(
                f"profile-{index}", self.prompt(context), self.parameters(4 * tokens + 8)
            )
        ready: set[str] = set()
        while len(ready) < requests:
            ready |= {out.request_id for out in engine.step() if out.outputs[0].token_ids}
        for _ in range(4):
            engine.step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(tokens):
            engine.step()
        torch.cuda.synchronize()
        plain = time.perf_counter() - started
        activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
        with profile(activities=activities) as session:
            for _ in range(tokens):
                engine.step()
            torch.cuda.synchronize()
        while engine.has_unfinished_requests():
            engine.step()
        return _table(session, tokens) | {"step_ms": 1000 * plain / tokens}

    def allreduce(self, _requests: int, _context: int, _tokens: int) -> list[dict[str, Any]]:
        """Rows of vLLM's ways to add up what the ranks have."""
        from e2e import allreduce

        return allreduce.rows()


def _table(session: Any, steps: int) -> dict[str, Any]:
    kernels: dict[str, KernelTime] = {}
    host: dict[str, int] = {}
    spans: list[Span] = []
    for event in session.events():
        if str(event.device_type).endswith("CUDA"):
            stream = getattr(event, "device_resource_id", None)
            spans.append(Span(event.name, event.time_range.start, event.time_range.end, stream))
            old = kernels.get(event.name, KernelTime(event.name, 0, 0.0))
            spent = event.time_range.elapsed_us()
            kernels[event.name] = KernelTime(event.name, old.count + 1, old.total_us + spent)
        elif event.name.startswith("cuda"):
            host[event.name] = host.get(event.name, 0) + 1
    ordered = sorted(kernels.values(), key=lambda kernel: -kernel.total_us)
    return {
        "gpu_us_per_step": sum(kernel.total_us for kernel in ordered) / steps,
        "families": by_family(ordered, steps),
        "kernels": [
            [kernel.name[:160], kernel.count / steps, kernel.total_us / steps]
            for kernel in ordered[:PROFILE_ROWS]
        ],
        "runtime_calls_per_step": {name: count / steps for name, count in host.items()},
        **wall_table(spans, steps),
    }


def wall_table(spans: list[Span], steps: int) -> dict[str, Any]:
    """Wall time by family and gaps, per step, and the kernels of one step one by one.

    `wall_us` with its `gaps` adds up to `span_us_per_step`, the time from the first kernel to the
    last over the steps; both are with the profiler on. `timeline` rows are name, start and duration
    in microseconds, and stream, of as many kernels as a step has on average.
    """
    spans = sorted(spans, key=lambda span: span.start)
    if not spans:
        return {"busy_us_per_step": 0.0, "span_us_per_step": 0.0, "wall_us": {}, "timeline": []}
    busy = busy_us([(span.start, span.stop) for span in spans]) / steps
    whole = (max(span.stop for span in spans) - spans[0].start) / steps
    shares = {family: round(us / steps, 2) for family, us in wall_shares(spans).items()}
    each = len(spans) // steps
    shown = spans[TIMELINE_STEP * each : (TIMELINE_STEP + 1) * each] or spans
    zero = shown[0].start
    return {
        "busy_us_per_step": busy,
        "span_us_per_step": whole,
        "wall_us": shares | {"gaps": round(whole - busy, 2)},
        "timeline": [
            [s.name[:48], round(s.start - zero, 1), round(s.stop - s.start, 1), s.stream]
            for s in shown
        ],
    }


def busy_us(spans: list[tuple[float, float]]) -> float:
    """Microseconds in which at least one kernel ran: what overlaps counts once."""
    busy, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy


def caches(runner: Any) -> Iterator[Any]:
    """Every tensor of the model runner's KV caches, however they are nested."""
    pending = [getattr(runner, "kv_caches", None)]
    while pending:
        held = pending.pop()
        if isinstance(held, dict):
            pending += held.values()
        elif isinstance(held, (list, tuple)):
            pending += held
        elif hasattr(held, "untyped_storage"):
            yield held


def pool(llm: Any) -> dict[str, Any]:
    """Size of the KV cache: GiB, blocks, and tokens of the longest request that fits."""
    config = llm.llm_engine.vllm_config
    found: dict[str, Any] = {"blocks": config.cache_config.num_gpu_blocks}
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    worker = getattr(getattr(core, "model_executor", None), "driver_worker", None)
    runner = getattr(getattr(worker, "worker", worker), "model_runner", None)
    stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in caches(runner)}
    if stores:
        found["gib"] = sum(stores.values()) / 2**30
    found["max_model_len"] = config.model_config.max_model_len
    found["async_scheduling"] = config.scheduler_config.async_scheduling
    return found


def perform(job: dict[str, Any], save: Any) -> None:
    """Run the measurements of `job`; `save` gets the result after each."""
    import torch

    result: dict[str, Any] = {"rows": []}
    bench = Bench(job["engine"])
    free, total = torch.cuda.mem_get_info()
    result |= {"start_s": bench.start_s, "used_gib": (total - free) / 2**30}
    result |= {"kv": pool(bench.llm)}
    save(result)
    for asked in job["measure"]:
        row = {"requests": 1, "context": 256, "tokens": 32, **asked}
        call = getattr(bench, row["kind"])
        try:
            if "drafts" in row:
                bench.verify(row["drafts"])
            found = call(row["requests"], row["context"], row["tokens"])
        except Exception:  # noqa: BLE001 - the next measurement may still work
            found = {"error": traceback.format_exc()}
        result["rows"] += found if isinstance(found, list) else [row | found]
        save(result)


def main() -> None:
    job_path, result_path = map(Path, sys.argv[1:])
    first = int(os.environ.get("RANK", "0")) == 0

    def save(result: dict[str, Any]) -> None:
        if first:
            result_path.write_text(json.dumps(result))

    perform(json.loads(job_path.read_text()), save)


if __name__ == "__main__":
    main()
