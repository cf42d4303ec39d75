"""What the results of a visit say, one line per job; decisions without effects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLAGS = ("passed", "within", "met", "attention_text_passed", "kernel_tests_passed", "greedy_equal",
         "planted_caught", "soak_fine")  # fmt: skip
FIGURES = ("pack_s", "pack_gib", "draft_ms", "sampled_p", "soak_steps", "prefix_reuse_second_turn",
           "decode_worst_ratio", "prefill_worst_ratio", "start_s", "used_gib")  # fmt: skip
SHAPE = ("kind", "scheme", "requests", "tokens", "context", "choice")
MEASURED = ("step_ms", "kl", "seconds", "tokens_per_s", "error")
MOST_ROWS = 20
WORDS = 160


def flags(result: Any) -> dict[str, bool]:
    """Every yes or no of a result, by its name; a mapping of several passes is one."""
    found: dict[str, bool] = {}
    if not isinstance(result, Mapping):
        return found
    for key, value in result.items():
        if isinstance(value, bool) and (key in FLAGS or key.startswith("greedy_equal")):
            found[key] = value
        elif key == "verdict" and isinstance(value, Mapping):
            found |= flags(value)
        elif key == "passed" and isinstance(value, Mapping) and value:
            found[key] = all(value.values())
    return found


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:WORDS]


def figures(result: Any) -> list[str]:
    """Figures worth a line: named ones, of `verdict`, counts of passes, and those of rows."""
    found = []
    rows = result
    if isinstance(result, Mapping):
        passed, inner = result.get("passed"), result.get("verdict")
        if isinstance(passed, Mapping):
            missed = [name for name, good in passed.items() if not good]
            found.append(f"{len(passed) - len(missed)} of {len(passed)} passed")
            found += [f"not {name}" for name in missed]
        known = {**result, **(inner if isinstance(inner, Mapping) else {})}
        found += [f"{key} {short(known[key])}" for key in FIGURES if known.get(key) is not None]
        rows = result.get("rows", [])
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, Mapping) and any(key in row for key in ("choice", *MEASURED)):
            shown = (*SHAPE, *MEASURED, "us")
            parts = [f"{key} {short(row[key])}" for key in shown if key in row]
            found.append(" ".join(parts))
    rest = len(found) - MOST_ROWS
    return [*found[:MOST_ROWS], *([f"{rest} more"] if rest > 0 else [])]


def verdict(rc: int, seconds: float, result: Any, last: str) -> dict[str, Any]:
    """How a job stands: `passed` is None where neither its result nor its end says so."""
    said = flags(result)
    passed: bool | None = all(said.values()) if said else None
    if rc != 0:
        passed = False
    return {"rc": rc, "seconds": round(seconds), "passed": passed, "flags": said,
            "figures": figures(result), "last": last[-WORDS:]}  # fmt: skip


def line(name: str, found: Mapping[str, Any]) -> str:
    """The verdict in words."""
    state = {True: "passed", False: "FAILED", None: "done"}[found["passed"]]
    said = "; ".join(found["figures"]) or found["last"]
    if found["passed"] is False and not found["figures"]:
        said = f"rc {found['rc']}: {found['last']}"
    return f"{name:20} {state:6} {found['seconds']:4} s  {said}"


def read(out: Path, ended: Mapping[str, tuple[int, float]]) -> dict[str, dict[str, Any]]:
    """Verdicts of all jobs by name, from what lies in OUT; `ended` has exit status and seconds."""
    found = {}
    for name, (rc, seconds) in ended.items():
        path, log = out / f"{name}.json", out / f"{name}.log"
        try:
            result = json.loads(path.read_text()) if path.is_file() else None
        except ValueError:
            result = None
        text = log.read_text(errors="replace").strip() if log.is_file() else ""
        found[name] = verdict(rc, seconds, result, text.rpartition("\n")[2])
    return found
