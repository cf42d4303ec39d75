"""Sampled text with drafting has the distribution of sampled text without; a bias is caught.

    python -m e2e.sampled --out RESULT.json [--method dflash] [--draws 1000] [--contexts 24]
                          [--plain PLAIN.json] [--plant verification|temperature]

Every context of the miniature's panel is continued `--draws` times for four tokens at temperature
1 and top_p 0.95, by an engine that drafts and by one that does not, each in a process of its own.
`--plant` plants a bias in the drafting engine, and then the test must fail: `verification` accepts
nine of ten drafts whatever the target says (vLLM's `synthetic` method, GPUs only), `temperature`
samples at 1.1. `--plain` keeps the draws without drafting, or takes them from there. Exit status 1
when the answer is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e import draft_rows, methods

PLANTED_TEMPERATURE = 1.1


def row_of(options: argparse.Namespace) -> tuple[str, float]:
    """The drafting engine's row, and the temperature it samples at."""
    if options.plant == "verification":
        return "planted", 1.0
    return options.method, PLANTED_TEMPERATURE if options.plant == "temperature" else 1.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.sampled")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", default="dflash", choices=list(draft_rows.ROWS))
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--contexts", type=int, default=24)
    parser.add_argument("--plain", type=Path, default=None)
    parser.add_argument("--plant", default="", choices=["verification", "temperature"])
    draft_rows.add_arguments(parser)
    made = parser.parse_args(arguments)
    made.wide_share = 0.0
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The comparison of both engines' draws."""
    name, temperature = row_of(options)
    text: dict[str, Any] = {"prompts": [], "max_tokens": 1}
    plain = methods.without(options, **text, **methods.drawing(options))
    plain |= {"lines": []}
    row = methods.judged(name, options, plain, **text, **methods.drawing(options, temperature))
    planted = {"method": options.method, "planted": options.plant}
    return {**planted, **row["sampled"], "accepted_per_step": row["accepted_per_step"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw with both engines and compare; the exit status."""
    options = parse(arguments)
    result = measure(options)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{options.method}{' with a planted bias' if options.plant else ''}: "
        f"{result['draws']:,} draws over {result['contexts']} contexts, smallest corrected p "
        f"{result['corrected_p']:.4f}: {'equal' if result['equal'] else 'different'}"
    )
    return int(result["equal"] == bool(options.plant))


if __name__ == "__main__":
    sys.exit(main())
