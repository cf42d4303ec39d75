"""The load protocols: many requests that start together, and one long prompt nobody has seen.

Prompts are random token ids sent to `/completions`, all different, so no prefix cache can help and
no tokenizer is in the way; tokens are counted by the server's running usage. `decode` takes the
time from the moment every request has its first token to the moment the first one ends, when all
of them run together. `prefill` is the time to the first token of an otherwise idle server.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from glm_bench import metrics
from glm_bench.client import Endpoint, ServerError, streaming

LOWEST_ID, HIGHEST_ID = 64, 1800
"""Ordinary tokens in every vocabulary this project serves."""
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Arrivals:
    """When tokens of one request arrived: (seconds since the clock's start, tokens so far)."""

    times: tuple[tuple[float, int], ...]

    @property
    def first_s(self) -> float:
        return self.times[0][0]

    @property
    def last_s(self) -> float:
        return self.times[-1][0]

    def tokens_between(self, start_s: float, stop_s: float) -> int:
        """Tokens that arrived after `start_s`, up to and including `stop_s`."""
        return self.tokens_at(stop_s) - self.tokens_at(start_s)

    def tokens_at(self, at_s: float) -> int:
        return max((count for when, count in self.times if when <= at_s), default=0)


@dataclass(frozen=True)
class DecodeRow:
    """`requests` at once: all together tokens per second, milliseconds per step, first tokens."""

    requests: int
    context: int
    tokens: int
    tokens_per_s: float
    step_ms: float
    ttft_last_s: float
    tokens_per_step: float = 1.0


@dataclass(frozen=True)
class PrefillRow:
    """One cold prompt."""

    context: int
    ttft_s: float
    tokens_per_s: float


@dataclass
class Prompts:
    """Random prompts, none of which comes twice."""

    seed: int = field(default_factory=time.time_ns)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()

    def __call__(self, length: int) -> list[int]:
        with self._lock:
            return self._random.choices(range(LOWEST_ID, HIGHEST_ID), k=length)


def stream_tokens(endpoint: Endpoint, prompt: Sequence[int], tokens: int, start: float) -> Arrivals:
    """Send one prompt of ids and note every arrival; raises `ServerError`."""
    body: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    with streaming(endpoint, "completions", body, TIMEOUT_S) as stream:
        return arrivals(stream, lambda: time.perf_counter() - start)


def arrivals(stream: Iterable[dict[str, Any]], clock: Callable[[], float]) -> Arrivals:
    """Every event that raised the count of tokens. Raises `ServerError` when none did."""
    times: list[tuple[float, int]] = []
    for event in stream:
        count = (event.get("usage") or {}).get("completion_tokens") or 0
        if count > (times[-1][1] if times else 0):
            times.append((clock(), count))
    if not times:
        raise ServerError("the stream told of no token (is continuous_usage_stats known?)")
    return Arrivals(tuple(times))


def decode(
    endpoint: Endpoint, requests: int, context: int, tokens: int, prompts: Prompts
) -> DecodeRow:
    """Carry the decode protocol out; raises `ServerError`."""
    asked = [prompts(context) for _ in range(requests)]
    before = metrics.read(endpoint)
    start = time.perf_counter()
    with ThreadPoolExecutor(requests) as pool:
        done = list(pool.map(lambda p: stream_tokens(endpoint, p, tokens, start), asked))
    drafted = metrics.read(endpoint).since(before)
    per_step = 1 + drafted.accepted_tokens / drafted.drafts if drafted.drafts else 1.0
    return decode_row(done, context, tokens, per_step)


def decode_row(
    done: Sequence[Arrivals], context: int, tokens: int, per_step: float = 1.0
) -> DecodeRow:
    """The figures of requests that ran together. Raises `ServerError` when they never did."""
    start, stop = max(a.first_s for a in done), min(a.last_s for a in done)
    produced = sum(a.tokens_between(start, stop) for a in done)
    if stop <= start or not produced:
        raise ServerError(
            f"{len(done)} requests of {tokens} tokens never ran together: ask for more tokens"
        )
    rate = produced / (stop - start)
    return DecodeRow(
        len(done), context, tokens, rate, 1000 * len(done) * per_step / rate, start, per_step
    )


def prefill(endpoint: Endpoint, context: int, prompts: Prompts) -> PrefillRow:
    """Carry the prefill protocol out; raises `ServerError`."""
    start = time.perf_counter()
    taken = stream_tokens(endpoint, prompts(context), 1, start).first_s
    return PrefillRow(context, taken, context / taken)
