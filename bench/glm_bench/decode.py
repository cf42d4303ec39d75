"""The decode protocol: one client, one request at a time, greedy, streamed.

Before the runs one short request warms the server up and is not counted. Speed is tokens after the
first chunk over the time they took; the report's figures are medians over the runs. Acceptance is
the change of the server's own counters over all runs, so nothing else may use the server meanwhile.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from glm_bench import metrics
from glm_bench.client import Completion, Endpoint, stream_chat
from glm_bench.coherence import inspect
from glm_bench.metrics import DraftCounters
from glm_bench.prompts import Kind, prompts_for
from glm_bench.results import Drafting, Report, Run, this_machine, timestamp

WARM_UP_TOKENS = 8


def measure(
    endpoint: Endpoint,
    kind: Kind,
    *,
    runs: int,
    max_tokens: int,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    coherence: bool = False,
    on_run: Callable[[Run], object] = lambda _run: None,
) -> Report:
    """Carry the protocol out; raises `ServerError`."""
    prompts = prompts_for(kind, runs)
    stream_chat(endpoint, _messages(prompts[0]), max_tokens=WARM_UP_TOKENS)
    before = metrics.read(endpoint)
    finished: list[Run] = []
    for prompt in prompts:
        completion = stream_chat(
            endpoint,
            _messages(prompt),
            max_tokens=max_tokens,
            temperature=temperature,
            ignore_eos=ignore_eos,
        )
        finished.append(as_run(prompt, completion, coherence=coherence))
        on_run(finished[-1])
    drafted = metrics.read(endpoint).since(before)
    return Report(
        date=timestamp(),
        machine=this_machine(),
        base_url=endpoint.base_url,
        model=endpoint.model,
        prompts=kind,
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        coherence_checked=coherence,
        runs=tuple(finished),
        tokens_per_s=round(statistics.median(run.tokens_per_s for run in finished), 2),
        ttft_s=round(statistics.median(run.ttft_s for run in finished), 4),
        itl_p50_ms=round(statistics.median(run.itl_p50_ms for run in finished), 2),
        drafting=as_drafting(drafted, finished),
    )


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def as_run(prompt: str, completion: Completion, *, coherence: bool) -> Run:
    """The record of one answer."""
    gaps = [gap * 1000 for gap in completion.gaps_s]
    whole = f"{completion.reasoning}\n{completion.text}"
    return Run(
        prompt=prompt,
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        finish_reason=completion.finish_reason,
        ttft_s=round(completion.ttft_s, 4),
        decode_s=round(completion.decode_s, 4),
        tokens_per_s=round(completion.tokens_per_s, 2),
        itl_p50_ms=round(percentile(gaps, 0.5), 2),
        itl_p95_ms=round(percentile(gaps, 0.95), 2),
        symptoms=tuple(inspect(whole, prompt)) if coherence else (),
    )


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie; 0 when there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def as_drafting(counters: DraftCounters, runs: list[Run]) -> Drafting | None:
    """What was drafted, or None when the server does not draft."""
    if not counters.drafts or counters.acceptance is None:
        return None
    return Drafting(
        drafts=counters.drafts,
        acceptance=round(counters.acceptance, 4),
        acceptance_per_position=tuple(round(x, 4) for x in counters.acceptance_per_position),
        tokens_per_step=round(1 + counters.accepted_tokens / counters.drafts, 3),
        step_ms=round(1000 * sum(run.decode_s for run in runs) / counters.drafts, 2),
    )


def one_line(report: Report) -> str:
    """The figures of a report for a person."""
    text = (
        f"{report.tokens_per_s:.1f} tok/s, first token {report.ttft_s:.2f} s, "
        f"{report.itl_p50_ms:.0f} ms between chunks"
    )
    if report.drafting:
        positions = " ".join(f"{share:.0%}" for share in report.drafting.acceptance_per_position)
        text += (
            f"; drafts accepted {report.drafting.acceptance:.0%} (by position {positions}), "
            f"{report.drafting.step_ms:.0f} ms per step"
        )
    return text
