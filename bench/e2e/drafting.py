"""Everything about drafting that a GPU must show, into `bench/expected/MACHINE/drafting.json`.

    python -m e2e.drafting WORK --expected expected/h200-1x/drafting.json [--budget-s 540]
                                [--only NAME,...] [--at-once 9]

Stages, in this order: `plain` (the engine without drafting: greedy text of 56 prompts, draws);
together `dflash`, `mtp` and `hybrid-eager` (text and draws), `dflash-packed`, `adaptive` and
`hybrid-adaptive` (text; all of these: `methods`), `planted` (the two-sample test must catch a bias)
and `soak` (10,000 random steps); then each alone, since they are timed, `pack` and `time` (real
dims, a random drafter or `--packed`) and `lookup`. Every stage is one process. WORK keeps what each
one answered, and `plain` is not repeated.

The file gets `draft_ms`, `greedy_equal`, `sampled_p`, `planted_caught`, `soak_steps`, `pack_s`,
`pack_gib`, accepted drafts per step, the lookup's microseconds and the date after every stage; keys
of other measurements stay. What fails leaves its key as it was, but a comparison that says
"different" is recorded. A stage that the budget has no seconds for is named. Exit status 1 when a
stage failed, missed its target or was left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from e2e import plugged

Figures = dict[str, Any]
MEMORY_GIB = "6"
DRAWS = ("--draws", "350", "--contexts", "24")  # of three verified tokens: 25,200 of them
PACKED = ("pack_s", "pack_gib")
TEXTS = ("dflash", "mtp", "dflash-packed", "hybrid-adaptive", "hybrid-eager", "adaptive")
GROUPS: dict[str, tuple[str, ...]] = {"methods": ("plain", *TEXTS), "sampled": ()}
"""Names that `--only` takes for several stages; draws are compared along with texts."""
NOISE = ("(", "[", "INFO", "WARNING", " ")
"""How lines begin that an engine still writes when the verdict is printed."""


@dataclass(frozen=True)
class Stage:
    """`seconds` is a guess, for the budget; stages that are `alone` are timed."""

    name: str
    command: tuple[str, ...]
    pick: Callable[[Figures], Figures]
    seconds: float
    alone: bool = False
    flag: tuple[str, ...] = ("--out",)


def compared(name: str) -> Callable[[Figures], Figures]:
    """Figures of one method out of `e2e.methods`."""

    def pick(found: Figures) -> Figures:
        row = found["methods"][name]
        figures = {
            f"greedy_equal.{name}": row["equal"],
            f"accepted_per_step.{name}": row["accepted_per_step"],
        }
        if "sampled" in row:
            figures[f"sampled_p.{name}"] = row["sampled"]["corrected_p"]
        return figures

    return pick


def stages(work: Path, packed: Path | None = None) -> tuple[Stage, ...]:
    """What to run; each command gets its result's path appended. `packed`: a drafter to time."""
    plain = ("--plain", str(work / "plain-answers.json"), "--memory-gib", MEMORY_GIB)
    timed = (str(packed),) if packed else ()

    def methods(name: str, *, drawn: bool, seconds: float) -> Stage:
        # Draws of the engine without drafting come along with its texts, so all ask for them.
        more = () if drawn else ("--text-only", "--batch", "16")
        command = ("e2e.methods", "--methods", name, *plain, *DRAWS, *more)
        return Stage(name, command, compared(name), seconds)

    soak = ("--soak", "10000", "--only", "changing-hybrid", "--memory-gib", MEMORY_GIB)
    return (
        Stage("plain", ("e2e.methods", "--methods", "", *plain, *DRAWS), lambda _: {}, 90),
        methods("dflash", drawn=True, seconds=100),
        methods("mtp", drawn=True, seconds=100),
        Stage("soak", ("e2e.draft_options", *soak), lambda f: {
            "soak_steps": f["changing-hybrid"].get("steps", 0),
            "soak_fine": f["changing-hybrid"]["ok"],
        }, 150),
        methods("dflash-packed", drawn=False, seconds=70),
        methods("hybrid-adaptive", drawn=False, seconds=80),
        methods("hybrid-eager", drawn=True, seconds=100),
        Stage("planted", ("e2e.sampled", "--plant", "verification", *plain, *DRAWS),
              lambda f: {"planted_caught": not f["equal"]}, 70),
        methods("adaptive", drawn=False, seconds=80),
        Stage("pack", ("e2e.draft_pack", str(work)), lambda f: {k: f[k] for k in PACKED}, 90, True),
        Stage("time", ("e2e.draft_time", *timed, "--profile"),
              lambda f: {"draft_ms": f["draft_ms"]}, 110, True),
        Stage("lookup", ("e2e.lookup_time",), lambda f: {
            f"lookup_us.{row['rows']}": row["us"] for row in f if row["texts_in"] == "host"
        }, 25, True, ()),
    )  # fmt: skip


def merged(figures: Figures, new: Figures) -> Figures:
    """The file with new figures, and what sums up all methods: the worst of each."""
    done = figures | new
    values = [value for key, value in done.items() if key.startswith("sampled_p.")]
    equal = [value for key, value in done.items() if key.startswith("greedy_equal.")]
    done |= {"sampled_p": min(values)} if values else {}
    return done | ({"greedy_equal": all(equal)} if equal else {})


def unready() -> str:
    """What keeps the engines from starting as the product does, or nothing."""
    if plugged.installed():
        return ""
    return (
        "vLLM would not load the plugin: no entry point glm_exl3 in vllm.general_plugins. "
        "Install it: python3 -m pip install --no-deps --no-build-isolation -e ROOT"
    )


class Visit:
    """The stages of one run, its clock and its file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begin = options, time.monotonic()
        self.bad: list[str] = []

    def left(self) -> float:
        return float(self.options.budget_s) - (time.monotonic() - self.begin)

    def run(self, stage: Stage) -> str:
        """One line about `stage`; its result lies in WORK."""
        result = self.options.work / f"{stage.name}.json"
        result.unlink(missing_ok=True)
        left = self.left()
        if left < stage.seconds / 2:
            self.bad.append(stage.name)
            return f"{stage.name}: LEFT OUT, {left:.0f} s of the budget are left"
        begin, log = time.monotonic(), self.options.work / f"{stage.name}.log"
        command = [sys.executable, "-m", *stage.command, *stage.flag, str(result)]
        with log.open("w") as output:
            try:
                code: int | str = subprocess.run(
                    command, stdout=output, stderr=subprocess.STDOUT, timeout=left, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = "stopped by the budget"
        if code:
            self.bad.append(stage.name)
        lines = log.read_text(errors="replace").splitlines()
        said = next((line for line in reversed(lines) if line and not line.startswith(NOISE)), "")
        verdict = "ok" if code == 0 else f"FAILED ({code}, see {log})"
        return f"{stage.name}: {verdict}, {time.monotonic() - begin:.0f} s: {said[:200]}"

    def keep(self, stage: Stage) -> None:
        """Put the stage's figures into the file, if it left any."""
        result, expected = self.options.work / f"{stage.name}.json", self.options.expected
        if not result.exists():
            return
        old = json.loads(expected.read_text()) if expected.exists() else {}
        with suppress(KeyError):
            old = merged(old, stage.pick(json.loads(result.read_text())))
        old["date"] = datetime.now(UTC).date().isoformat()
        expected.parent.mkdir(parents=True, exist_ok=True)
        expected.write_text(json.dumps(old, indent=1, sort_keys=True) + "\n")

    def go(self, wanted: Sequence[Stage]) -> None:
        """All of `wanted`: `plain` first, then those that may overlap, then those alone."""
        for group, width in batches(wanted, self.options.at_once):
            with ThreadPoolExecutor(width) as pool:
                running = {pool.submit(self.run, stage): stage for stage in group}
                for done in as_completed(running):
                    print(done.result(), flush=True)
                    self.keep(running[done])


def batches(wanted: Sequence[Stage], at_once: int) -> Iterator[tuple[list[Stage], int]]:
    """Groups of stages, and how many of a group run together."""
    yield [one for one in wanted if one.name == "plain"], 1
    yield [one for one in wanted if one.name != "plain" and not one.alone], at_once
    yield [one for one in wanted if one.alone], 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for and write the file after each."""
    parser = argparse.ArgumentParser(prog="python -m e2e.drafting")
    parser.add_argument("work", type=Path)
    parser.add_argument("--expected", type=Path, required=True)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--packed", type=Path, help="drafter that `time` takes; a random one")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--at-once", type=int, default=9, help="engines that share the GPU")
    options = parser.parse_args(arguments)
    missing = unready()
    if missing:
        print(missing)
        return 1
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    names = {name for one in options.only for name in GROUPS.get(one, (one,))}
    every = stages(options.work, options.packed)
    unknown = names - {one.name for one in every}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}")
    wanted = [one for one in every if not options.only or one.name in names]
    visit = Visit(options)
    visit.go(wanted)
    print(f"drafting: {len(wanted) - len(visit.bad)} of {len(wanted)} stages ok in "
          f"{time.monotonic() - visit.begin:.0f} s"
          + (f"; not: {', '.join(visit.bad)}" if visit.bad else ""))  # fmt: skip
    return int(bool(visit.bad))


if __name__ == "__main__":
    sys.exit(main())
