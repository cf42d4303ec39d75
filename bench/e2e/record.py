"""Turn results of `e2e.inside`, `e2e.serve` and `e2e.peer_engine` into rows of
`bench/expected/MACHINE/e2e.json`.

    python -m e2e.record FILE --machine "NVIDIA H200" --versions vllm=0.33.0,... \\
        [--date 2026-11-30] [--requests 1,2] [--drop TEXT] RESULT.json=CONDITIONS ...

A row is `{metric, engine, value, unit, conditions}`; a row that is measured again under the same
metric, engine and conditions replaces the old one. `--date` is the day of the runs, today where it
is left out. `--requests` takes only rows of that many requests at once, for a pool that held no
more of them; `--drop` forgets old rows whose conditions contain TEXT. Nothing is computed here but
units and, for the peer, the rate of a step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from e2e.serve import numbers

ENGINES = ("ours", "exllamav3")
FASTEST = "fastest of three rounds"  # of the steps of `e2e.peer_engine`
Row = dict[str, Any]
Figure = tuple[str, float, str, str]
"""Metric, value, unit, and what the conditions of the whole result do not say."""


def rows_of(
    result: dict[str, Any], conditions: str, requests: Sequence[int] | None = None
) -> Iterator[Row]:
    """Rows of one result file; measurements that failed, or of other numbers of `requests` than
    those wanted (None: all), give none. ValueError for an engine that `ENGINES` lacks."""
    engine = result.get("engine", "ours").partition(" ")[0]
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r}: known are {', '.join(ENGINES)}; add it to ENGINES")
    wanted = [
        measured
        for measured in result["rows"]
        if "error" not in measured and (requests is None or measured.get("requests", 1) in requests)
    ]
    if engine != "ours":
        figures = peer(wanted)
    else:
        figures = served(result, wanted) if "ready_s" in result else inside(wanted)
    for metric, value, unit, more in figures:
        entry = {"metric": metric, "engine": engine, "value": round(value, 3), "unit": unit}
        yield entry | {"conditions": f"{conditions}; {more}"}


def inside(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    """Figures of `e2e.inside`. Of random weights no draft is accepted, so that tokens per second
    of a row with drafts say nothing: its step alone counts."""
    for measured in rows:
        requests, context, drafts = measured["requests"], measured["context"], drafted(measured)
        if measured["kind"] == "decode":
            steps = f"mean of {measured['steps']:g} steps"
            where = f"{requests} requests of {context} tokens{drafts}, {steps}"
            yield "decode_step", measured["step_ms"], "ms", where
            if not drafts:
                yield "decode_rate", measured["batch_tokens_per_s"], "tok/s", where
        elif measured["kind"] == "prefill":
            where = f"{context} tokens, one cold request{drafts}, to the first token"
            yield "prefill_rate", measured["tokens_per_s"], "tok/s", where
        elif measured["kind"] == "together":
            where = (
                f"{requests} requests of {context} tokens that start at once{drafts}, "
                f"{measured['tokens']} tokens each, until all are done, "
                f"{measured['finished']} finished, {measured['preemptions']} evicted"
            )
            yield "together", measured["seconds"], "s", where
        elif measured["kind"] == "profile":
            where = f"{requests} requests of {context} tokens{drafts}, torch profiler"
            yield from profiled(measured, where)


def profiled(measured: dict[str, Any], where: str) -> Iterator[Figure]:
    """Figures of one profile: the step without the profiler, then times under it."""
    yield "profiled_step", measured["step_ms"], "ms", where + ", profiler off"
    yield "gpu_time", measured["gpu_us_per_step"] / 1000, "ms/step", where
    yield "gpu_busy", measured["busy_us_per_step"] / 1000, "ms/step", where
    for family, spent in measured["families"].items():
        yield f"gpu_time: {family}", spent["us"] / 1000, "ms/step", where
    for family, us in measured.get("wall_us", {}).items():
        yield f"wall_time: {family}", us / 1000, "ms/step", where


def drafted(measured: dict[str, Any]) -> str:
    """How many tokens a step were drafted, as a part of the conditions; none: nothing."""
    drafts = measured.get("drafts")
    return f", {drafts} drafts a step, drafting included" if drafts else ""


def peer(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    """Figures of `e2e.peer_engine`: passes of its model, without drafting."""
    for measured in rows:
        if measured["kind"] == "decode":
            requests, step_ms = measured["requests"], measured["step_ms"]
            where = f"{requests} requests of {measured['context']} tokens, {FASTEST}"
            yield "decode_step", step_ms, "ms", where
            yield "decode_rate", 1000 * requests / step_ms, "tok/s", where
        elif measured["kind"] == "verify":
            tokens = f"{measured['tokens']} tokens of each a pass"
            where = f"{measured['requests']} requests, {tokens}, {FASTEST}"
            yield "verify_step", measured["step_ms"], "ms", where
        elif measured["kind"] == "prefill":
            where = f"{measured['context']} tokens, one cold request, to its logits"
            yield "prefill_rate", measured["tokens_per_s"], "tok/s", where


def served(result: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    """Figures of `e2e.serve`: READY, the longest request, then those of its load."""
    yield "ready", result["ready_s"], "s", "from the command to the first completed token"
    if result.get("max_model_len"):
        yield "max_model_len", result["max_model_len"], "tokens", "what /v1/models says"
    for measured in rows:
        context = measured["context"]
        if "step_ms" in measured:
            where = (
                f"over HTTP, {measured['requests']} requests of {context} tokens, "
                f"{measured['tokens']} tokens each, while all run"
            )
            yield "decode_step", measured["step_ms"], "ms", where
            yield "decode_rate", measured["tokens_per_s"], "tok/s", where
            yield "first_token_of_all", measured["ttft_last_s"], "s", where
        else:
            where = f"over HTTP, {context} tokens, one cold request, to the first token"
            yield "prefill_rate", measured["tokens_per_s"], "tok/s", where


def without(rows: Sequence[Row], texts: Sequence[str]) -> list[Row]:
    """Rows whose conditions contain none of `texts`; ValueError for a text that no row has."""
    for text in texts:
        if not any(text in row["conditions"] for row in rows):
            raise ValueError(f"--drop {text!r}: no row has these words in its conditions")
    return [row for row in rows if not any(text in row["conditions"] for text in texts)]


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """All rows, the newer in place of the older."""

    def key(row: Row) -> tuple[str, str, str]:
        return row["metric"], row["engine"], row["conditions"]

    found = {key(row): row for row in (*old, *new)}
    return list(found.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, write the file."""
    parser = argparse.ArgumentParser(prog="python -m e2e.record")
    parser.add_argument("file", type=Path)
    parser.add_argument("results", nargs="+", metavar="RESULT.json=CONDITIONS")
    parser.add_argument("--machine", required=True)
    parser.add_argument("--versions", required=True, metavar="NAME=VERSION,...")
    parser.add_argument("--date", default=datetime.now(UTC).date().isoformat())
    parser.add_argument("--requests", type=numbers, help="numbers of requests, such as 1,2")
    parser.add_argument("--drop", action="append", default=[], metavar="TEXT")
    options = parser.parse_args(arguments)
    old = json.loads(options.file.read_text())["rows"] if options.file.exists() else []
    old = without(old, options.drop)
    new: list[Row] = []
    for entry in options.results:
        path, _, conditions = entry.partition("=")
        new += rows_of(json.loads(Path(path).read_text()), conditions, options.requests)
    document = {
        "machine": options.machine,
        "date": options.date,
        "versions": dict(part.split("=") for part in options.versions.split(",")),
        "rows": merged(old, new),
    }
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
