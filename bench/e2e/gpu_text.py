"""A GPU's greedy text of checkpoints read from disk is the CPU engine's, however it is served.

    python -m e2e.gpu_text WORK --out RESULT.json [--only one] [--seconds 400] [--at-once 7]
    python -m e2e.gpu_text WORK --out RESULT.json --only two
    python -m e2e.gpu_text WORK --reference

Every case is one engine in a process of its own. `one`: without drafting, MTP and DFlash2 with CUDA
graphs, eager, and with a prefix cache that holds the prompts, each compared with the CPU engine's
lines in `bench/expected/cpu-engine/texts.json`. `two`: two ranks, compared with the lines that one
rank without drafting gives on the same GPU. Equal means the rule of `tests/engine/equivalence.py`;
drafts must be accepted sometimes and rejected sometimes, and the cache must be hit. Models: the
trained miniature (16 prompts: beginnings of 6 to 23 tokens, held-out texts of 192, needles beyond
the 512 tokens that the indexer chooses), and the tiny `full` checkpoint with random weights.

The result is written after every case, and none starts behind `--seconds`; exit status 1 if one
differs or is missing. `--reference` writes the file of lines with the engine of this machine. The
ranks are vLLM's own worker processes, as in a server: one process compares, whatever ranks do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from e2e import child, draft_rows
from e2e.plugged import python_path
from h200.engines import NCCL
from kvcache.turns import BLOCK, GRAIN

REFERENCE = draft_rows.ROOT / "bench" / "expected" / "cpu-engine" / "texts.json"
BEGINNINGS = (6, 8, 11, 13, 16, 18, 21, 23)
TEXTS = NEEDLES = 4
RANDOM_LENGTHS, RANDOM_IDS = (3, 9, 17, 33, 70, 150, 400, 700), (64, 1800)
TOKENS = 48
DIGITS = 5
WIDE_SHARE = 0.005
SHARES = (0.2, 0.8)
DRAFTED = 4
"""By the miniature's drafter: of 7 tokens it gets 18 % accepted on these prompts."""
LONGEST = 2048
REQUESTS = 16


@dataclass(frozen=True)
class Case:
    """One engine: a row of `draft_rows`, and how it is served."""

    model: str
    row: str = "none"
    eager: bool = False
    cached: bool = False
    ranks: int = 1

    @property
    def name(self) -> str:
        marks = {"eager": self.eager, "cached": self.cached, f"tp{self.ranks}": self.ranks > 1}
        return "-".join([self.model, self.row, *(mark for mark, on in marks.items() if on)])

    @property
    def drafts(self) -> bool:
        return self.row != "none"


def served(model: str) -> tuple[Case, ...]:
    drafted = tuple(Case(model, row) for row in ("none", "mtp", "dflash"))
    return (*drafted, Case(model, eager=True), Case(model, cached=True))


BASES = (Case("nano"), Case("tiny"))
ONE = (*served("nano"), Case("nano", "dflash-packed"), *served("tiny"), Case("tr3"))
TWO = tuple(Case(base.model, row, ranks=2) for base in BASES for row in ("none", "mtp", "dflash"))
CASES = {case.name: case for case in (*ONE, *TWO)}
GROUPS = {"one": tuple(case.name for case in ONE),
          "two": tuple(case.name for case in (*BASES, *TWO))}  # fmt: skip


@cache
def asked(model: str) -> list[list[int]]:
    """Prompts as token ids, short ones first."""
    if model == "tiny":
        chance = random.Random(0)
        return [[chance.randrange(*RANDOM_IDS) for _ in range(n)] for n in RANDOM_LENGTHS]
    panel = json.loads(draft_rows.PANEL.read_text())
    texts: list[list[int]] = panel["prompts"]
    beginnings = [text[:length] for text, length in zip(texts[TEXTS:], BEGINNINGS, strict=False)]
    return beginnings + texts[:TEXTS] + [one["prompt"] for one in panel["needles"][:NEEDLES]]


def tiny_folders(root: Path) -> tuple[Path, Path]:
    """The tiny `full` checkpoint and its drafter below ROOT, made once."""
    folder, drafter = root / "tiny", root / "tiny-drafter"
    if not drafter.exists():  # written last
        root.mkdir(parents=True, exist_ok=True)
        command = (sys.executable, "-m", "glm_exl3.ref.tiny", "--family", "full")
        places = ("--out", str(folder), "--drafter", str(drafter))
        path = {"PYTHONPATH": python_path(root)}
        subprocess.run([*command, *places], check=True, env={**os.environ, **path})
    return folder, drafter


def made(model: str, tiny: Path) -> tuple[Path, Path]:
    """A model's folder and that of its drafter; the tiny ones lie below TINY."""
    if model == "tiny":
        return tiny_folders(tiny)
    name = {"nano": "full-4bpw"}.get(model, model)
    return draft_rows.MODEL / name, draft_rows.MODEL / "drafter"


def digest(prompts: Sequence[Sequence[int]], folder: Path) -> str:
    """Of what lines depend on: the prompts and the bytes of the weights."""
    found = hashlib.sha256(json.dumps(prompts).encode())
    for file in sorted(folder.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()


def engine(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`."""
    folder, drafter = made(case.model, options.tiny)
    given = argparse.Namespace(
        model=folder, drafter=drafter, packed=draft_rows.MODEL / "drafter-6bpw",
        eager=case.eager, memory_gib=options.memory_gib, batch=REQUESTS,
    )  # fmt: skip
    arguments = draft_rows.arguments(draft_rows.ROWS[case.row], given)
    if case.model == "nano" and case.row.startswith("dflash"):
        arguments["speculative_config"]["num_speculative_tokens"] = DRAFTED
    arguments |= {"max_model_len": LONGEST, "enable_prefix_caching": case.cached}
    if case.cached:
        arguments |= {"block_size": BLOCK, "prefix_match_unit": GRAIN}
    if case.ranks > 1:
        arguments["tensor_parallel_size"] = case.ranks
    return arguments | dict(options.more)


def perform(job: Mapping[str, Any]) -> dict[str, Any]:
    """One engine in this process: `lines` if they are to be kept, `comparison` with a reference."""
    from equivalence import Line, compare
    from in_process import Engine

    answer = Engine(job["engine"])
    prompts = job["prompts"]
    found: dict[str, Any] = {}
    if job["keep"]:
        found["lines"] = [vars(line) for line in answer(prompts, [job["tokens"]] * len(prompts))]
    if "reference" in job:
        lines = [Line(**{k: tuple(v) for k, v in line.items()}) for line in job["reference"]]
        found["comparison"] = compare(prompts, lines, answer, WIDE_SHARE).as_json()
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return found | {"counters": answer.counters(), "device": device}


def figures(case: Case, found: Mapping[str, Any]) -> dict[str, Any]:
    """What a case showed, and whether all of it is as it must be."""
    comparison, counters = found["comparison"], found["counters"]
    row = {key: comparison[key] for key in ("positions", "ties", "median_difference")}
    row |= {"wide": len(comparison["wide"]), "broken": comparison["broken"][:3]}
    row["equal"] = not comparison["broken"]
    good = row["equal"]
    if case.drafts:
        proposed = counters.get("vllm:spec_decode_num_draft_tokens", 0)
        accepted = counters.get("vllm:spec_decode_num_accepted_tokens", 0)
        row["accepted_share"] = round(accepted / proposed, 4) if proposed else 0.0
        row["accepted_per_step"] = round(draft_rows.accepted(counters), 4)
        good = good and SHARES[0] <= row["accepted_share"] <= SHARES[1]
    if case.cached:
        row["tokens_from_cache"] = counters.get("vllm:prefix_cache_hits", 0)
        good = good and row["tokens_from_cache"] > 0
    return row | {"device": found["device"], "passed": good}


def verdict(name: str, row: Mapping[str, Any]) -> str:
    """One line about a case."""
    if "error" in row:
        return f"{name}: MISSING, {row['error'].strip().splitlines()[-1][:160]}"
    text = "equal" if row["equal"] else "DIFFERENT"
    flips = f"{row['positions']} positions, {row['ties']} ties, {row['wide']} wide"
    parts = [f"{name}: {'passed' if row['passed'] else 'FAILED'}"]
    parts.append(f"{text} to {row['against']} ({flips})")
    if "accepted_share" in row:
        parts.append(f"{row['accepted_share']:.1%} of drafts accepted")
    if "tokens_from_cache" in row:
        parts.append(f"{row['tokens_from_cache']:.0f} tokens from the cache")
    return ", ".join([*parts, f"{row['seconds']:.0f} s"])


class Visit:
    """The cases of one run, its clock and its file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.lock = options, threading.Lock()
        self.deadline = time.monotonic() + options.seconds
        self.path = python_path(options.work)
        self.rows: dict[str, Any] = {}
        self.kept: dict[str, list[Any]] = {}

    def run(self, case: Case, **job: Any) -> dict[str, Any]:
        """What the engine of `case` makes of its prompts; `error` where it fails."""
        left = self.deadline - time.monotonic()
        if left < self.options.least:
            return {"error": "no time was left"}
        job |= {"engine": engine(case, self.options), "tokens": self.options.tokens}
        job |= {"prompts": asked(case.model)[: self.options.prompts]}
        words = ("-m", "e2e.gpu_text", "{job}", "--child", "--out", "{out}")
        environment = {"PYTHONPATH": self.path, **(NCCL if case.ranks > 1 else {})}
        out = self.options.work / f"{case.name}.json"
        return child.run(words, job, out, left, environment)

    def lines(self, case: Case) -> list[Any]:
        """The lines that `case` is compared with. Raises ValueError if they are of other inputs."""
        if case.ranks > 1:
            if not self.kept.get(case.model):
                raise ValueError(f"one rank of {case.model} here gave nothing to compare with")
            return self.kept[case.model]
        known = json.loads(REFERENCE.read_text())["models"][case.model]
        folder = made(case.model, self.options.tiny)[0]
        if digest(asked(case.model), folder) != known["sha256"]:
            raise ValueError(f"{REFERENCE.name} has lines of another {case.model}: --reference")
        return list(known["lines"][: self.options.prompts])

    def compare(self, case: Case) -> None:
        """One row, kept in the file and told."""
        began = time.monotonic()
        keep = case in BASES or case.cached  # a cache holds what was asked before
        try:
            found = self.run(case, reference=self.lines(case), keep=keep)
        except (ValueError, subprocess.CalledProcessError) as error:
            found = {"error": str(error)}
        if case in BASES:
            self.kept[case.model] = found.get("lines", [])
        row = found if "error" in found else figures(case, found)
        against = f"{case.model} on one rank" if case.ranks > 1 else "the CPU engine"
        row |= {"against": against, "seconds": round(time.monotonic() - began, 1)}
        with self.lock:
            self.rows[case.name] = row
            self.save()
            print(verdict(case.name, row), flush=True)

    def save(self) -> None:
        passed = {name: row.get("passed", False) for name, row in self.rows.items()}
        record = {"date": time.strftime("%Y-%m-%d"), "passed": passed, "cases": self.rows}
        self.options.out.write_text(json.dumps(record, indent=1) + "\n")

    def all(self, wanted: Sequence[Case]) -> int:
        """Every case; ranks wait for the lines that they are compared with. The exit status."""
        for case in wanted:  # checkpoints are made once, before engines ask for them together
            with suppress(subprocess.CalledProcessError):
                made(case.model, self.options.tiny)
        for ranks in (1, 2):
            together = [case for case in wanted if case.ranks == ranks]
            with ThreadPoolExecutor(self.options.at_once) as pool:
                list(pool.map(self.compare, together))
        good = sum(row.get("passed", False) for row in self.rows.values())
        print(f"gpu_text: {good} of {len(wanted)} cases passed")
        return int(good < len(wanted))


def rounded(line: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """A line with log-probabilities and margins (nats) of few digits."""
    return {key: [round(value, DIGITS) for value in values] for key, values in line.items()}


def write_reference(visit: Visit) -> int:
    """Lines of every model from the engine of this machine."""
    record: dict[str, Any] = {"machine": visit.options.machine, "models": {}}
    record["date"] = time.strftime("%Y-%m-%d")
    for model in dict.fromkeys(case.model for case in ONE):
        found = visit.run(Case(model, eager=True), keep=True)
        if "error" in found:
            print(found["error"])
            return 1
        folder = made(model, visit.options.tiny)[0]
        lines = [rounded(line) for line in found["lines"]]
        record["models"][model] = {"sha256": digest(asked(model), folder), "lines": lines}
        print(f"{model}: {len(lines)} lines", flush=True)
    text = json.dumps(record, indent=1)
    flat = re.sub(r"\[[^][{}]*\]", lambda numbers: "".join(numbers[0].split()), text)
    REFERENCE.write_text(flat + "\n")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.gpu_text")
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","), default=["one"])
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--at-once", type=int, default=7, help="engines that share a GPU")
    parser.add_argument("--least", type=float, default=30, help="seconds that an engine needs")
    parser.add_argument("--memory-gib", type=float, default=8.0, help="of KV cache; 0: vLLM's")
    parser.add_argument("--prompts", type=int, default=None, help="only the first ones")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a reference's lines")
    parser.add_argument("--more", type=json.loads, default={}, help="further engine arguments")
    parser.add_argument("--tiny", type=Path, help="where the tiny checkpoint is or gets; WORK")
    parser.add_argument("--reference", action="store_true", help="write the file of lines")
    parser.add_argument("--machine", default="", help="what the reference says it was made on")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = [name for one in options.only for name in GROUPS.get(one, (one,))]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join([*GROUPS, *CASES])}")
    if options.out is None and not options.reference:
        parser.error("--out names the file of the result")
    options.tiny = options.tiny or options.work
    options.cases = [CASES[name] for name in dict.fromkeys(names)]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.child:
        options.out.write_text(json.dumps(perform(json.loads(options.work.read_text()))))
        return 0
    options.work, options.tiny = options.work.resolve(), options.tiny.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    visit = Visit(options)
    return write_reference(visit) if options.reference else visit.all(options.cases)


if __name__ == "__main__":
    sys.exit(main())
