"""Turn results of `e2e.inside` into rows of a results file, `bench/expected/MACHINE/e2e.json`.

    python -m e2e.record FILE --machine "NVIDIA H200" --versions vllm=0.33.0,... \\
        RESULT.json=CONDITIONS ...

A row is `{metric, engine, value, unit, conditions}`; a row that is measured again under the same
metric, engine and conditions replaces the old one. Nothing is computed here but units.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ENGINES = ("ours", "exllamav3")
Row = dict[str, Any]


def rows_of(result: dict[str, Any], conditions: str) -> Iterator[Row]:
    """Rows of one result file; measurements that failed give none."""

    def row(metric: str, value: float, unit: str, more: str) -> Row:
        text = f"{conditions}; {more}"
        entry = {"metric": metric, "engine": "ours", "value": round(value, 3), "unit": unit}
        return entry | {"conditions": text}

    for measured in result["rows"]:
        if "error" in measured:
            continue
        requests, context = measured["requests"], measured["context"]
        if measured["kind"] == "decode":
            where = f"{requests} requests of {context} tokens, mean of {measured['steps']:g} steps"
            yield row("decode_step", measured["step_ms"], "ms", where)
            yield row("decode_rate", measured["batch_tokens_per_s"], "tok/s", where)
        elif measured["kind"] == "prefill":
            where = f"{context} tokens, one cold request, to the first token"
            yield row("prefill_rate", measured["tokens_per_s"], "tok/s", where)
        elif measured["kind"] == "profile":
            where = f"{requests} requests of {context} tokens, torch profiler"
            yield row("profiled_step", measured["step_ms"], "ms", where + ", profiler off")
            yield row("gpu_time", measured["gpu_us_per_step"] / 1000, "ms/step", where)
            yield row("gpu_busy", measured["busy_us_per_step"] / 1000, "ms/step", where)
            for family, spent in measured["families"].items():
                yield row(f"gpu_time: {family}", spent["us"] / 1000, "ms/step", where)
            for family, us in measured.get("wall_us", {}).items():
                yield row(f"wall_time: {family}", us / 1000, "ms/step", where)


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
    options = parser.parse_args(arguments)
    old = json.loads(options.file.read_text())["rows"] if options.file.exists() else []
    new: list[Row] = []
    for entry in options.results:
        path, _, conditions = entry.partition("=")
        new += rows_of(json.loads(Path(path).read_text()), conditions)
    document = {
        "machine": options.machine,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": dict(part.split("=") for part in options.versions.split(",")),
        "rows": merged(old, new),
    }
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
