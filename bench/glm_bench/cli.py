"""`glm-bench`: measure an endpoint over HTTP.

Load tests belong to `vllm bench serve`, which the engine brings along; this measures what that does
not show: one user's decode speed, acceptance by draft position, and whether the text is sound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glm_bench import decode, load
from glm_bench.client import Endpoint, ServerError, served_model
from glm_bench.prompts import KINDS
from glm_bench.results import Report, Run, timestamp

DEFAULT_URL = "http://127.0.0.1:8888/v1"
EXIT_FAILED, EXIT_GARBLED = 5, 6
LOAD_WARM_UP = 32


def parser(base_url: str) -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(prog="glm-bench", description=__doc__.splitlines()[0])
    verbs = top.add_subparsers(dest="verb", required=True, metavar="{decode,load}")
    _add_load(verbs, base_url)
    sub = verbs.add_parser(
        "decode",
        help="decode speed of one client, one request at a time",
        description=decode.__doc__,
        epilog="The API key is read from VLLM_API_KEY. Exit codes: 0 ok, 5 no answer, 6 garbled.",
    )
    sub.add_argument("--url", default=base_url, help="address with /v1 (%(default)s)")
    sub.add_argument("--model", help="model name; default: the first one the server lists")
    sub.add_argument("--prompts", choices=KINDS, default="prose", help="(%(default)s)")
    sub.add_argument("--runs", type=_positive, default=5, help="requests (%(default)s)")
    sub.add_argument("--max-tokens", type=_positive, default=400, help="(%(default)s)")
    sub.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    sub.add_argument("--ignore-eos", action="store_true", help="always decode max-tokens tokens")
    sub.add_argument("--coherence", action="store_true", help="look for garbled text; exit 6")
    sub.add_argument("--json", action="store_true", help="print the report as JSON")
    sub.add_argument("--output", type=Path, help="also write the JSON report to this file")
    return top


def _add_load(verbs: Any, base_url: str) -> None:
    sub = verbs.add_parser(
        "load",
        help="many requests at once, and cold prompts of given lengths",
        description=load.__doc__,
        epilog="The API key is read from VLLM_API_KEY. Exit codes: 0 ok, 5 no answer.",
    )
    sub.add_argument("--url", default=base_url, help="address with /v1 (%(default)s)")
    sub.add_argument("--model", help="model name; default: the first one the server lists")
    sub.add_argument("--requests", type=_numbers, default=[1, 2, 4, 8, 16], metavar="N,N")
    sub.add_argument("--context", type=_positive, default=1024, help="prompt of each (%(default)s)")
    sub.add_argument("--max-tokens", type=_positive, default=128, help="(%(default)s)")
    sub.add_argument(
        "--prefill", type=_numbers, default=[], metavar="N,N", help="lengths of cold prompts"
    )
    sub.add_argument("--output", type=Path, help="write the rows as JSON to this file")


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def run(
    arguments: Sequence[str],
    base_url: str = DEFAULT_URL,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Run one verb; the exit code."""
    options = parser(base_url).parse_args(arguments)
    key = environ.get("VLLM_API_KEY") or None
    try:
        model = options.model or served_model(options.url, key)
        if options.verb == "load":
            return run_load(options, Endpoint(options.url, model, key))
        report = decode.measure(
            Endpoint(options.url, model, key),
            options.prompts,
            runs=options.runs,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
            coherence=options.coherence,
            on_run=(lambda _run: None) if options.json else say_run,
        )
    except ServerError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    if options.output:
        report.save(options.output)
    print(json.dumps(report.as_json(), indent=2) if options.json else summary(report))
    return 0 if report.is_coherent else EXIT_GARBLED


def run_load(options: argparse.Namespace, endpoint: Endpoint) -> int:
    """The load protocols in order; one line each."""
    prompts = load.Prompts()
    rows: list[load.DecodeRow | load.PrefillRow] = []
    load.decode(endpoint, max(options.requests), LOAD_WARM_UP, LOAD_WARM_UP, prompts)
    for requests in options.requests:
        row = load.decode(endpoint, requests, options.context, options.max_tokens, prompts)
        rows.append(row)
        print(f"{requests:4d} requests  {row.tokens_per_s:8.1f} tok/s  {row.step_ms:7.2f} ms/step")
    for context in options.prefill:
        cold = load.prefill(endpoint, context, prompts)
        rows.append(cold)
        print(f"{context:7d} tokens  {cold.tokens_per_s:8.0f} tok/s  first {cold.ttft_s:.2f} s")
    if options.output:
        document = {"date": timestamp(), "model": endpoint.model, "rows": list(map(asdict, rows))}
        options.output.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def say_run(run: Run) -> None:
    """One line per request."""
    garbled = "".join(f"  {symptom.kind}: {symptom.seen}" for symptom in run.symptoms)
    print(
        f"{run.completion_tokens:5d} tokens  {run.tokens_per_s:7.1f} tok/s  "
        f"first {run.ttft_s:.2f} s  {run.finish_reason:6}{garbled}",
        flush=True,
    )


def summary(report: Report) -> str:
    """The report in two lines."""
    machine = report.machine
    where = f"{machine.cpu}, {machine.cores} cores, {', '.join(machine.gpus) or 'no GPU'}"
    sound = "" if not report.coherence_checked else (
        ", text sound" if report.is_coherent else ", text GARBLED"
    )  # fmt: skip
    return (
        f"{decode.one_line(report)}{sound}\n{report.prompts}, {len(report.runs)} runs of at most "
        f"{report.max_tokens} tokens, {report.date}, client on {where}"
    )


def main() -> None:
    """Entry point."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
