"""Where measured figures go: results.json beside this file, with machine and date."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")


def here() -> dict[str, Any]:
    """The machine, how busy it is with other work (mean of 15 minutes), and the day."""
    return {
        "machine": f"{os.cpu_count()} cores shared with other work, Linux {platform.release()}",
        "load": round(os.getloadavg()[2], 1), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def note(part: str, value: dict[str, Any], *, path: Path = RESULTS) -> None:
    """Put figures under `stayup`."""
    known = json.loads(path.read_text())
    known.setdefault("stayup", {})[part] = value
    path.write_text(json.dumps(known, indent=1) + "\n")


def of(part: str, *, path: Path = RESULTS) -> dict[str, Any]:
    """What is known under `stayup`; empty when nothing is."""
    return json.loads(path.read_text()).get("stayup", {}).get(part, {})


BEGIN, END = "<!-- figures: tests/lab/figures.py writes this table -->", "<!-- end of figures -->"
PAGE = Path(__file__).parents[2] / "docs" / "stay-up.md"
Row = tuple[str, str, str]


def detection(known: dict[str, Any]) -> list[Row]:
    """What `detect.py` measured."""
    rows = []
    for part, where in (("processes", "one machine"), ("nodes", "two lab nodes")):
        for name, one in known.get(part, {}).items():
            if isinstance(one, dict):
                found = f"{one['told_s']:g} s; back {one['back_after_told_s']:g} s later"
                limit = f"{one['limit_s']:g} s; {one['back_limit_s']:g} s (cold start + 60)"
                rows.append((f"{name}, fake ranks, {where}", found, limit))
    return rows


def real(known: dict[str, Any]) -> list[Row]:
    """The real engine on lab nodes (`test_engine_stayup.py`)."""
    rows = []
    limit = f"cold start + 60 s = {known.get('cold_start_s', 0) + 60:g} s"
    for name, told, back, most in (
        ("cable pulled and put back", "cable_told_s", "cable_back_after_plug_s", 5),
        ("worker frozen under traffic", "frozen_told_s", "frozen_back_s", 90),
        ("worker killed under traffic", "killed_told_s", "killed_back_s", 5),
    ):
        if told in known and back in known:
            found = f"{known[told]:g} s; back {known[back]:g} s later"
            rows.append((f"{name}, real engine, two lab nodes", found, f"{most} s; {limit}"))
    return rows


def long_runs(known: dict[str, Any]) -> list[Row]:
    """Two hours, the real queue, faults and cycles."""
    rows = []
    if one := known.get("endurance"):
        stalls = one["pauses"]["compile"]
        found = (
            f"{one['false_restarts']} in {one['minutes']:g} min; {stalls['count']} compilers, "
            f"{stalls['sum_s']:g} s, the longest {stalls['max_s']:g} s; {one['answers']} answers, "
            f"{one['failed_requests']} failed requests"
        )
        rows.append(("false restarts at a full queue, fake ranks", found, "0"))
    if one := known.get("engine_queue"):
        found = (
            f"{one['false_restarts']} in {one['minutes']:g} min, queue full "
            f"{one['full_queue_percent']:g} % of the time; then a killed worker told after "
            f"{one['killed_worker_told_s']} s, back after {one['killed_worker_back_s']:g} s"
        )
        limit = f"0; 5 s; {one['cold_start_s'] + 60:g} s (cold start + 60)"
        rows.append(("false restarts at a full queue, real engine on the CPU", found, limit))
    if one := known.get("faults"):
        found = (
            f"{len(one['violations'])} violations in {one['faults']} faults, {one['restarts']} "
            f"restarts, back after at most {one['back_s']['max']:g} s"
        )
        rows.append((f"seeded random faults, two lab nodes, seeds {one['seeds']}", found, "0"))
    if one := known.get("cycles"):
        found = f"{len(one['violations'])} violations in {one['cycles']} cycles"
        rows.append(("start/stop cycles, two lab nodes", found, "0"))
    return rows


def table(known: dict[str, Any]) -> str:
    """`stayup` as the table of docs/stay-up.md."""
    rows = detection(known.get("detection", {})) + real(known.get("engine_nodes", {}))
    lines = ["| what | measured | limit |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows + long_runs(known)]
    return "\n".join(lines)


def written(page: str, known: dict[str, Any]) -> str:
    """The page with the table put in."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(known)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), json.loads(RESULTS.read_text())["stayup"]))
