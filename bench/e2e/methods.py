"""Text is the same with every drafting method as without: greedy, and sampled if `--draws` asks.

    python -m e2e.methods --out RESULT.json [--prompts 56] [--tokens 256] [--methods mtp,dflash]
                          [--plain PLAIN.json] [--draws 1000] [--budget-s 540]

Each method is one engine in a process of its own, compared with the engine without drafting: greedy
text by the near-tie rule of `tests/engine/equivalence.py`, draws by `e2e.two_sample`. Prompts: the
panel of the miniature, whole and cut to a quarter, and every seventh one so long that the indexer
has to choose. `--plain` keeps what the engine without drafting wrote, or takes it from there. The
result is written after every method and holds accepted drafts per step, too. A method that does
not fit into `--budget-s` any more is left out and named. Exit status 1 when one differs or was left
out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e import draft_rows
from e2e.two_sample import compare

WIDE_SHARE = 0.005
CUTS = (192, 48)
JOINED, BETWEEN = 3, 6
METHODS = ("mtp", "dflash", "dflash-packed", "hybrid", "hybrid-15", "adaptive", "hybrid-adaptive")
CONTEXT, LENGTH, TOP_P = 24, 4, 0.95
VERIFIED = range(1, LENGTH)
"""The first token is sampled without a draft; the others are decided by verification."""


def panel() -> list[list[int]]:
    found: list[list[int]] = json.loads(draft_rows.PANEL.read_text())["prompts"]
    return found


def prompts(count: int) -> list[list[int]]:
    """The panel's prompts and their beginnings; after six of them, three joined to a long one."""
    texts, made = panel(), []
    for index, short in enumerate(prompt[:cut] for cut in CUTS for prompt in texts):
        made.append(short)
        if index % BETWEEN == BETWEEN - 1:
            first = index // BETWEEN
            made.append([token for one in range(JOINED) for token in texts[first + 8 * one]])
    return made[:count]


def drawing(options: argparse.Namespace, temperature: float = 1.0) -> dict[str, Any]:
    """The job's part that draws; empty when no draws are asked for."""
    if not options.draws:
        return {}
    return {
        "draws": {
            "contexts": [prompt[:CONTEXT] for prompt in panel()[: options.contexts]],
            "count": options.draws,
            "tokens": LENGTH,
            "temperature": temperature,
            "top_p": TOP_P,
        }
    }


def without(options: argparse.Namespace, **job: Any) -> dict[str, Any]:
    """What the engine without drafting makes of `job`, from `--plain` if that holds it.

    A job without prompts takes draws that were made beside texts.
    """
    kept: Path | None = options.plain
    if kept is not None and kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        wanted = job if job["prompts"] else {"draws": job["draws"]}
        if any(found["asked"].get(key) != value for key, value in wanted.items()):
            raise SystemExit(f"{kept} answers another job: remove it, or ask as it was asked")
        return found
    found = draft_rows.run("none", options, **job) | {"asked": job}
    if kept is not None:
        kept.write_text(json.dumps(found))
    return found


def judged(
    name: str, options: argparse.Namespace, plain: dict[str, Any], **job: Any
) -> dict[str, Any]:
    """The row's result: texts, draws and accepted drafts."""
    reference = {"reference": plain["lines"], "wide_share": options.wide_share}
    begin = time.monotonic()
    found = draft_rows.run(name, options, **job, **(reference if plain["lines"] else {}))
    row: dict[str, Any] = {"accepted_per_step": round(draft_rows.accepted(found["counters"]), 4)}
    if plain["lines"]:
        comparison = found["comparison"]
        row |= {
            "equal": not comparison["broken"],
            "positions": comparison["positions"],
            "ties": comparison["ties"],
            "wide": len(comparison["wide"]),
            "broken": comparison["broken"][:3],
        }
    if "draws" in found:
        row["sampled"] = compare(found["draws"], plain["draws"], VERIFIED).as_json()
    return row | {"seconds": round(time.monotonic() - begin, 1)}


def verdict(name: str, row: dict[str, Any]) -> str:
    """One line about a row."""
    parts = [f"{name}: {row['accepted_per_step']:.3f} accepted a step"]
    if "equal" in row:
        said = "equal" if row["equal"] else "DIFFERENT"
        parts.append(
            f"greedy {said} ({row['positions']} positions, {row['ties']} ties, {row['wide']} wide)"
        )
    if "sampled" in row:
        seen = row["sampled"]
        said = "equal" if seen["equal"] else "DIFFERENT"
        parts.append(f"sampled {said} ({seen['draws']:,} draws, p {seen['corrected_p']:.4f})")
    return ", ".join(parts)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rows by method, saved after each."""
    begin = time.monotonic()
    job = {"prompts": prompts(options.prompts), "max_tokens": options.tokens} | drawing(options)
    plain = without(options, **job)
    own = {key: value for key, value in job.items() if key != "draws" or not options.text_only}
    result: dict[str, Any] = {"prompts": options.prompts, "tokens": options.tokens, "methods": {}}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"none: {len(plain['lines'])} texts, {sum(map(len, plain.get('draws', [])))} continuations"
    )
    longest = 0.0
    for name in options.methods:
        spent = time.monotonic() - begin
        if options.budget_s and spent + longest > options.budget_s:
            result.setdefault("left_out", []).append(name)
            continue
        row = judged(name, options, plain, **own)
        longest = max(longest, row["seconds"])
        result["methods"][name] = row
        rows = result["methods"].values()
        if options.prompts:
            result["greedy_equal"] = all(one["equal"] for one in rows)
        if options.draws and not options.text_only:
            result["sampled_p"] = {
                key: one["sampled"]["corrected_p"] for key, one in result["methods"].items()
            }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(verdict(name, row), flush=True)
    if "left_out" in result:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"left out, {options.budget_s:.0f} s are spent: {', '.join(result['left_out'])}")
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.methods")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=56)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument(
        "--methods", type=lambda text: [one for one in text.split(",") if one],
        default=list(METHODS),
    )  # fmt: skip
    parser.add_argument("--plain", type=Path, default=None)
    parser.add_argument("--draws", type=int, default=0)
    parser.add_argument("--contexts", type=int, default=24)
    parser.add_argument("--text-only", action="store_true", help="draw without drafting only")
    parser.add_argument("--wide-share", type=float, default=WIDE_SHARE)
    parser.add_argument("--budget-s", type=float, default=0.0)
    draft_rows.add_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every method; the exit status."""
    result = measure(parse(arguments))
    rows = result["methods"].values()
    good = all(row.get("equal", True) and row.get("sampled", OK)["equal"] for row in rows)
    return int(not good or "left_out" in result)


OK = {"equal": True}

if __name__ == "__main__":
    sys.exit(main())
