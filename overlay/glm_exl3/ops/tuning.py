"""Which kernel serves how many tokens of a shape, from a table of data.

`tuning.json` has `rules`, one plan per operation that holds for every device, and `measured`, plans
for single shapes with the machine and the date of the measurement (`python -m kernels.tune` writes
them). A measured plan serves the compute capability it was measured on; everything else follows the
rule. Each plan is logged once, when its shape is first met.

Up to eight tokens of a shape must share one step: a token's bits may not depend on its neighbours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from glm_exl3.log import logger

TABLE = Path(__file__).with_name("tuning.json")
# What a path does: decodes weights in registers for a few rows; sorts rows into tiles; decodes once
# for the vendor's product.
STREAMED, TILED, DECODED = "streamed", "tiled", "decoded"
ROW_PATHS = (STREAMED, "rows", "scaled", "widened")  # of 8-bit rows, see `recoded`
PATHS = {
    "linear": (STREAMED, DECODED),
    "moe": (STREAMED, TILED),
    "fp8": ROW_PATHS,
    "int8": (STREAMED, "rows", "widened"),
}
# Matrix instructions of the tiled path: the device's best, Hopper's for warpgroups, or a warp's.
PRODUCTS = {"auto": 0, "warpgroup": 1, "warp": 2}
ANY_NUMBER = sys.maxsize
ALIKE = 8  # so many tokens share a step

_log = logger(__name__)


@dataclass(frozen=True)
class Step:
    """Up to `tokens` tokens: the path, how often it cuts k (0: its own rule), its instructions."""

    path: str
    tokens: int = ANY_NUMBER
    split_k: int = 0
    product: str = "auto"

    def __str__(self) -> str:
        reach = "any number" if self.tokens == ANY_NUMBER else f"up to {self.tokens}"
        cut = f", k in {self.split_k}" if self.split_k else ""
        return f"{reach}: {self.path}{cut}"


@dataclass(frozen=True)
class Problem:
    """One shape of `linear`, `fp8` or `int8` (k x n) or of `moe` (hidden x intermediate).

    8-bit rows have their operation's name for a codebook.
    """

    op: str
    k: int
    n: int
    bits: int
    codebook: str


@cache
def table(path: Path = TABLE) -> Mapping[str, Any]:
    """The parsed data file."""
    loaded: Mapping[str, Any] = json.loads(path.read_text())
    return loaded


def steps_of(row: Mapping[str, Any]) -> tuple[Step, ...]:
    """The plan of one row of the table. Raises ValueError where it breaks this module's rules."""
    steps = tuple(Step(**step) for step in row["steps"])
    reaches = [step.tokens for step in steps]
    if reaches != sorted(set(reaches)) or reaches[-1] != ANY_NUMBER:
        raise ValueError(f"{row}: steps must ascend and end without a number of tokens")
    if reaches[0] < ALIKE:
        raise ValueError(f"{row}: up to {ALIKE} tokens must share the first step")
    for step in steps:
        if step.path not in PATHS[row["op"]] or step.product not in PRODUCTS:
            raise ValueError(f"{row}: {row['op']} has no {step.path} path with {step.product}")
    return steps


def matches(row: Mapping[str, Any], problem: Problem, capability: tuple[int, int]) -> bool:
    """Whether a measured row is for this shape and device."""
    shape = (row["op"], row["k"], row["n"], row["bits"], row["codebook"])
    wanted = (problem.op, problem.k, problem.n, problem.bits, problem.codebook)
    return shape == wanted and tuple(row["capability"]) == capability


@cache
def plan(problem: Problem, capability: tuple[int, int]) -> tuple[Step, ...]:
    """The steps for `problem` on a device of `capability`, fewest tokens first; logs them once."""
    rows = [row for row in table()["measured"] if matches(row, problem, capability)]
    if rows:
        source = f"measured on {rows[-1]['machine']}, {rows[-1]['date']}"
    else:
        rows = [row for row in table()["rules"] if row["op"] == problem.op]
        source = "by rule"
    steps = steps_of(rows[-1])
    name = f"{problem.op} {problem.k}x{problem.n} K{problem.bits} {problem.codebook}"
    _log.info("%s, %s: %s", name, source, "; ".join(map(str, steps)))
    return steps


def step(problem: Problem, capability: tuple[int, int], tokens: int) -> Step:
    """The step that serves `tokens` tokens."""
    return next(step for step in plan(problem, capability) if tokens <= step.tokens)
