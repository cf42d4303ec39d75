"""Drive one engine through turns or random sequences and compare each answer with a cold one.

    python prefix_job.py JOB.json RESULT.json

`turns`: a chat of `length` tokens, its answer, a second turn. `sequences`: random requests that
share prefixes, overlap, are aborted, resent or keep themselves out of the cache, in a pool so
small that it evicts and preempts; the cache is reset now and then. `unstored` and `parked`: a
prompt that stores nothing, and one that the pool forgot and host memory kept. The cold answer to a
prompt is that of a request that reads and stores nothing.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equivalence import Line, compare
from in_process import Engine, as_line

VOCABULARY = (64, 1800)
NO_STORE = {"store_prefix": 0}


@dataclass
class Asked:
    """One request of a sequence."""

    prompt: list[int]
    length: int
    stored: bool = True
    start: int = 0
    abort_after: int | None = None
    line: Line | None = None
    cached: int = 0


@dataclass
class Counts:
    """What the sequences went through."""

    requests: int = 0
    aborted: int = 0
    unstored: int = 0
    resets: int = 0
    hits: int = 0
    reused_tokens: int = 0
    prompt_tokens: int = 0
    inside_block: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


class Driver:
    """The engine with its scheduler, one step at a time."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.engine = Engine({"enable_prefix_caching": True, **arguments})
        self.llm = self.engine.llm
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.number = 0

    @property
    def block(self) -> int:
        return self.scheduler.block_size

    def parameters(self, length: int, *, stored: bool, reads: bool) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=length,
            temperature=0,
            ignore_eos=True,
            logprobs=2,
            skip_reading_prefix_cache=not reads,
            extra_args=None if stored else NO_STORE,
        )

    def ask(self, asked: Sequence[Asked], *, reads: bool = True) -> None:
        """Run these requests together; each starts and may be aborted at its step."""
        waiting, running = sorted(asked, key=lambda one: one.start), {}
        step = 0
        while waiting or running:
            while waiting and (waiting[0].start <= step or not running):
                self._start(waiting.pop(0), running, step, reads=reads)
            for output in self.llm.llm_engine.step():
                if output.finished and output.request_id in running:
                    one, _ = running.pop(output.request_id)
                    one.line = as_line(output.outputs[0])
                    one.cached = output.num_cached_tokens or 0
            step += 1
            self._abort(running, step)

    def _start(self, one: Asked, running: dict[str, Any], step: int, *, reads: bool) -> None:
        name = f"asked-{self.number}"
        self.number += 1
        self.llm.llm_engine.add_request(
            name,
            {"prompt_token_ids": one.prompt},
            self.parameters(one.length, stored=one.stored and reads, reads=reads),
        )
        running[name] = (one, step)

    def _abort(self, running: dict[str, Any], step: int) -> None:
        for name, (one, began) in list(running.items()):
            if one.abort_after is not None and step - began >= one.abort_after:
                self.llm.llm_engine.abort_request([name])
                running.pop(name)

    def cold(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Line]:
        asked = [Asked(list(p), n) for p, n in zip(prompts, lengths, strict=True)]
        self.ask(asked, reads=False)
        return [one.line for one in asked if one.line is not None]

    def judge(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """Compare recorded answers with cold ones by the rule of `equivalence`."""
        prompts = [one.prompt for one in asked]
        reference = self.cold(prompts, [one.length for one in asked])
        recorded = [one.line for one in asked]

        def generate(extended: Any, lengths: Any) -> list[Line]:
            if recorded:
                first = [line for line in recorded if line is not None]
                recorded.clear()
                return first
            again = [Asked(list(p), n) for p, n in zip(extended, lengths, strict=True)]
            self.ask(again)
            return [one.line for one in again if one.line is not None]

        found = compare(prompts, reference, generate)
        exact = sum(
            one.line is not None and one.line.logprobs == line.logprobs
            for one, line in zip(asked, reference, strict=True)
        )
        return found.as_json() | {"answers": len(asked), "equal_to_the_bit": exact}


def turns(driver: Driver, job: dict[str, Any]) -> dict[str, Any]:
    """Two turns of one chat: what the second reused, and whether it answers like a cold one."""
    generator = random.Random(job.get("seed", 0))
    first = job.get("text") or _words(generator, job["length"])
    opening = Asked(first[: job["length"]], job["answer"])
    began = time.monotonic()
    driver.ask([opening])
    middle = time.monotonic()
    answer = list(opening.line.tokens) if opening.line else []
    second = Asked([*opening.prompt, *answer, *_words(generator, job["question"])], job["answer"])
    driver.ask([second])
    ended = time.monotonic()
    return {
        "first_tokens": len(opening.prompt),
        "second_tokens": len(second.prompt),
        "reused_tokens": second.cached,
        "reused": second.cached / len(second.prompt),
        "reused_of_first": second.cached / len(opening.prompt),
        "seconds": [round(middle - began, 1), round(ended - middle, 1)],
        "comparison": driver.judge([second]),
    }


def sequences(driver: Driver, job: dict[str, Any]) -> dict[str, Any]:
    """`count` random sequences; every answer that was not aborted is judged, `together` at once."""
    generator = random.Random(job.get("seed", 0))
    documents = [_words(generator, generator.randint(150, job["longest"])) for _ in range(5)]
    chats: list[list[int]] = []
    totals = {"positions": 0, "ties": 0, "answers": 0, "equal_to_the_bit": 0}
    result: dict[str, Any] = {"sequences": 0, "broken": [], "counts": Counts()}
    pending: list[Asked] = []
    for number in range(1, job["count"] + 1):
        asked = [
            _request(generator, documents, chats, job, result["counts"])
            for _ in range(generator.randint(1, 4))
        ]
        driver.ask(asked)
        answered = [one for one in asked if one.line is not None]
        _count(result["counts"], asked, answered, driver.block)
        chats += [[*one.prompt, *one.line.tokens] for one in answered if one.line]
        del chats[:-8]
        pending += answered
        if generator.random() < 0.1:
            result["counts"].resets += bool(driver.llm.reset_prefix_cache())
        if number % job.get("together", 5) and number < job["count"]:
            continue
        verdict = driver.judge(pending) if pending else {"broken": []}
        pending = []
        for key in totals:
            totals[key] += verdict.get(key, 0)
        result["broken"] += [f"until sequence {number}: {text}" for text in verdict["broken"]]
        result["sequences"] = number
        if job.get("progress"):
            Path(job["progress"]).write_text(json.dumps(totals | _plain(result), indent=1))
    return totals | _plain(result)


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    return result | {"counts": vars(result["counts"])}


def _request(
    generator: random.Random, documents: Any, chats: Any, job: dict[str, Any], counts: Counts
) -> Asked:
    kinds = ["document"] + (["turn", "again", "branch"] if chats else [])
    kind = generator.choice(kinds)
    counts.kinds[kind] = counts.kinds.get(kind, 0) + 1
    if kind == "document":
        document = generator.choice(documents)
        prompt = document[: generator.randint(len(document) // 2, len(document))]
        prompt = prompt + _words(generator, generator.randint(1, 60))
    else:
        chat = generator.choice(chats)
        kept = chat if kind != "branch" else chat[: generator.randint(len(chat) // 2, len(chat))]
        prompt = kept + ([] if kind == "again" else _words(generator, generator.randint(1, 80)))
    aborted = generator.random() < 0.15
    return Asked(
        prompt[: job["longest"] + 200],
        generator.choice(job.get("lengths", (1, 3, 6))),
        stored=generator.random() > 0.1,
        start=generator.choice((0, 0, 1, 3)),
        abort_after=generator.randint(1, 4) if aborted else None,
    )


def _count(counts: Counts, asked: list[Asked], answered: list[Asked], block: int) -> None:
    counts.requests += len(asked)
    counts.aborted += len(asked) - len(answered)
    counts.unstored += sum(not one.stored for one in asked)
    counts.hits += sum(one.cached > 0 for one in answered)
    counts.reused_tokens += sum(one.cached for one in answered)
    counts.prompt_tokens += sum(len(one.prompt) for one in answered)
    counts.inside_block += sum(one.cached % block != 0 for one in answered)


def unstored(driver: Driver, job: dict[str, Any]) -> dict[str, Any]:
    """A prompt that kept itself out, then the same one: nothing may be found."""
    prompt = _words(random.Random(job.get("seed", 7)), job["length"])
    first, again, third = (Asked(prompt, 4, stored=stored) for stored in (False, True, True))
    for one in (first, again, third):
        driver.ask([one])
    return {"after_unstored": again.cached, "after_stored": third.cached}


def parked(driver: Driver, job: dict[str, Any]) -> dict[str, Any]:
    """A prompt, others until the pool has forgotten it, and the prompt again, from the host."""
    generator = random.Random(job.get("seed", 11))
    first = Asked(_words(generator, job["length"]), 4)
    driver.ask([first])
    for _ in range(job["others"]):
        driver.ask([Asked(_words(generator, job["length"]), 2)])
    again = Asked(first.prompt, 4)
    driver.ask([again])
    external = driver.engine.counters().get("vllm:external_prefix_cache_hits", 0)
    return {
        "reused_tokens": again.cached,
        "from_host": external,
        "comparison": driver.judge([again]),
    }


def _words(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(*VOCABULARY) for _ in range(count)]


def pool(driver: Driver) -> dict[str, Any]:
    """Geometry of the pool that the engine made."""
    config = driver.scheduler.kv_cache_config
    coordinator = driver.scheduler.kv_cache_manager.coordinator
    return {
        "block_tokens": driver.block,
        "blocks": config.num_blocks,
        "block_bytes": config.kv_cache_tensors[0].size // config.num_blocks,
        "groups": [
            [type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size,
             len(group.layer_names)]
            for group in config.kv_cache_groups
        ],
        "unit": driver.scheduler.hash_block_size,
        "inside_blocks": bool(coordinator.enable_partial_hash_hits),
    }  # fmt: skip


PARTS = {"unstored": unstored, "parked": parked, "turns": turns, "sequences": sequences}


def main() -> None:
    job_path, result_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    driver = Driver(job["engine"])
    result = {"pool": pool(driver)}
    for name, part in PARTS.items():
        if name in job:
            result[name] = part(driver, job[name])
    result["counters"] = driver.engine.counters()
    result_path.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
