"""Random steps of one engine in this process, with everything that may happen to a request.

    python soak.py JOB.json RESULT.json

The job holds `engine` (keyword arguments of `vllm.LLM`), `steps`, `seed`, `vocabulary` (low, high)
and `poison`: fill the KV cache with NaN before the first step, so that a read of memory that nobody
wrote shows. Requests arrive at random with random prompts, half of them repeating themselves, mixed
greedy and sampled; some are aborted, now and then all are preempted, and with an adaptive scheduler
the draft length is random in half of the steps. Checked in every step: token ids and positions
going in, token ids and log-probabilities coming out, and that requests make progress.

It runs on a GPU alike: leave `enforce_eager` out of the job's engine.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

STEP_TIMEOUT_S = 300
PATIENCE_STEPS = 200


@dataclass
class Tally:
    """What happened."""

    steps: int = 0
    started: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Soak:
    """The engine, the requests in it and the dice."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.dice = random.Random(job["seed"])
        self.vocabulary = tuple(job["vocabulary"])
        self.tally = Tally()
        self.llm = LLM(**{"enforce_eager": True, "seed": 0, "max_model_len": 512, **job["engine"]})
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.active: dict[str, int] = {}
        if job.get("poison"):
            poison(self.runner)
        self._watch()

    def _watch(self) -> None:
        """Look at what every step gives the model, and count drafts where they are judged."""
        prepare, size = self.runner.prepare_inputs, self.runner.vocab_size
        limit = self.runner.max_model_len

        def checked(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            ids, places = batch.input_ids[: batch.num_tokens], batch.positions[: batch.num_tokens]
            if not (int(ids.min()) >= 0 and int(ids.max()) < size):
                self.tally.wrong.append(f"token ids {ids.tolist()} of {size}")
            if not (int(places.min()) >= 0 and int(places.max()) < limit):
                self.tally.wrong.append(f"positions {places.tolist()} of {limit}")
            return batch

        self.runner.prepare_inputs = checked
        judge = self.scheduler.make_spec_decoding_stats

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.tally.drafted += kwargs["num_draft_tokens"]
            self.tally.accepted += kwargs["num_accepted_tokens"]
            return judge(*args, **kwargs)

        self.scheduler.make_spec_decoding_stats = counted
        if not hasattr(self.scheduler, "captured"):
            return
        choose = self.scheduler.length

        def length() -> int:
            k = self.dice.choice(self.scheduler.captured) if self.dice.random() < 0.5 else choose()
            self.tally.lengths[k] = self.tally.lengths.get(k, 0) + 1
            return k

        self.scheduler.length = length

    def add(self) -> None:
        from vllm import SamplingParams

        dice = self.dice
        count = dice.choice((1, 2, 5, 17, 40, 90, 200))
        text = [dice.randrange(*self.vocabulary) for _ in range(count)]
        if dice.random() < 0.5:
            text = (text[: max(1, count // 4)] * 5)[:count]
        sampled = dice.random() < 0.5
        parameters = SamplingParams(
            max_tokens=dice.choice((1, 2, 9, 30, 120, 400)),
            temperature=dice.choice((0.3, 1.0)) if sampled else 0.0,
            top_p=0.95 if sampled else 1.0,
            seed=dice.randrange(1000) if dice.random() < 0.5 else None,
            ignore_eos=True, logprobs=1, detokenize=False,
        )  # fmt: skip
        name = f"r{self.tally.started}"
        self.tally.started += 1
        self.engine.add_request(name, {"prompt_token_ids": text}, parameters)
        self.active[name] = self.tally.steps

    def step(self) -> None:
        signal.alarm(STEP_TIMEOUT_S)
        outputs = self.engine.step()
        signal.alarm(0)
        self.tally.steps += 1
        for output in outputs:
            self.check(output)
        waited = [n for n, last in self.active.items() if self.tally.steps - last > PATIENCE_STEPS]
        if waited and self.scheduler.running:
            self.tally.wrong.append(f"no progress of {waited} in {PATIENCE_STEPS} steps")

    def check(self, output: Any) -> None:
        answer = output.outputs[0]
        size = self.runner.vocab_size
        fresh = list(answer.token_ids)[-16:]
        if any(not 0 <= token < size for token in fresh):
            self.tally.wrong.append(f"{output.request_id}: token ids {fresh}")
        for entry in (answer.logprobs or [])[-16:]:
            if any(not math.isfinite(value.logprob) for value in entry.values()):
                self.tally.wrong.append(f"{output.request_id}: {entry}")
                break
        self.active[output.request_id] = self.tally.steps
        if output.finished:
            self.tally.finished += 1
            self.tally.tokens += len(answer.token_ids)
            self.active.pop(output.request_id, None)

    def disturb(self) -> None:
        """Let requests arrive, vanish and be preempted."""
        if len(self.active) < 7 and self.dice.random() < 0.25:
            self.add()
        if self.active and self.dice.random() < 0.02:
            name = self.dice.choice(sorted(self.active))
            self.engine.abort_request([name])
            self.active.pop(name)
            self.tally.aborted += 1
        if self.dice.random() < 0.01 and self.scheduler.running:
            self.tally.preemptions += len(self.scheduler.running)
            self.llm.reset_prefix_cache(reset_running_requests=True)

    def run(self, steps: int, result: Path) -> Tally:
        begin = time.monotonic()
        while self.tally.steps < steps and not self.tally.wrong:
            self.disturb()
            self.step()
            if self.tally.steps % 250 == 0:
                print(f"{time.monotonic() - begin:.0f} s: {self.tally}", flush=True)
                result.write_text(json.dumps(vars(self.tally)))
        self.engine.abort_request(sorted(self.active))
        for _ in range(PATIENCE_STEPS):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        else:
            self.tally.wrong.append(f"never finished: {sorted(self.active)}")
        return self.tally


def poison(runner: Any) -> None:
    """Fill the floating-point caches of all layers with NaN."""
    import torch

    def fill(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for part in value:
                fill(part)
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            value.fill_(float("nan"))

    for layer in runner.vllm_config.compilation_config.static_forward_context.values():
        fill(getattr(layer, "kv_cache", None))


def main() -> None:
    job, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    tally = Soak(job).run(job["steps"], result)
    result.write_text(json.dumps(vars(tally)))
    print(tally)


if __name__ == "__main__":
    main()
