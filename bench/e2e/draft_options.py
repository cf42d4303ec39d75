"""Random steps of the drafting engine go on, whatever picks the number of drafts.

    python -m e2e.draft_options --out RESULT.json --soak 10000 [--only changing-hybrid] [--eager]
    python -m e2e.draft_options --out RESULT.json [--eager]

The second compares greedy text with lookup and adaptive lengths (`e2e.methods`). The first runs
`tests/engine/soak.py` with a KV cache full of NaN: with vLLM's own scheduler, with the adaptive one
at a constant length, and with lengths that change from step to step, so that a NaN which goes with
changing lengths shows which of them it needs. A way that does not fit into `--budget-s` any more is
left out and named. Exit status 1 when a step is wrong or a way was left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e import draft_rows, methods

SOAK = draft_rows.ROOT / "tests" / "engine" / "soak.py"
TEXTS = "hybrid,hybrid-15,adaptive,hybrid-adaptive"
SOAKS = {
    "changing-hybrid": draft_rows.ROWS["hybrid-adaptive"],
    "changing": draft_rows.ROWS["adaptive"],
    "constant": draft_rows.Row(lengths=(7, 7)),
    "stock": draft_rows.ROWS["dflash"],
}


def job(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What `soak.py` is asked for."""
    small = {"max_num_seqs": 4, "max_model_len": 512, "enable_prefix_caching": True, "seed": 0}
    return {
        "engine": draft_rows.arguments(SOAKS[name], options) | small,
        "steps": options.soak,
        "seed": options.seed,
        "vocabulary": [64, 1800],
        "poison": True,
    }


def walk(name: str, options: argparse.Namespace, seconds: float | None) -> dict[str, Any]:
    """The tally of one way; `wrong` says when it ended early."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "job.json"), Path(folder, "result.json")
        given.write_text(json.dumps(job(name, options)))
        command = [sys.executable, str(SOAK), str(given), str(made)]
        environment = {**os.environ, **SOAKS[name].environment}
        try:
            done = subprocess.run(command, check=False, timeout=seconds, env=environment)
            said = f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            said = f"not done after {seconds or 0:.0f} s"
        found: dict[str, Any] = json.loads(made.read_text()) if made.exists() else {"wrong": [said]}
    if found.get("steps", 0) < options.soak and not found["wrong"]:
        found["wrong"].append(said)
    return {"ok": not found["wrong"], **found}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row per way of choosing lengths, saved after each."""
    begin = time.monotonic()
    rows: dict[str, Any] = {}
    for name in options.only or SOAKS:
        left = options.budget_s - (time.monotonic() - begin) if options.budget_s else None
        if left is not None and left < 1:
            rows[name] = {"ok": False, "wrong": ["left out: the time is spent"]}
        else:
            rows[name] = walk(name, options, left)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
        row = rows[name]
        said = "fine" if row["ok"] else "; ".join(row["wrong"][:2])
        print(f"{name}: {row.get('steps', 0):,} random steps: {said}", flush=True)
    return rows


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m e2e.draft_options")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--only", type=lambda text: text.split(","), default=None)
    made.add_argument("--soak", type=int, default=0, metavar="STEPS")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--budget-s", type=float, default=0.0)
    draft_rows.add_arguments(made)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options, rest = parser().parse_known_args(given)
    if not options.soak:
        return methods.main(["--methods", TEXTS, *given])
    if rest:
        parser().error(f"unknown: {' '.join(rest)}")
    rows = measure(options)
    return int(not all(row["ok"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
