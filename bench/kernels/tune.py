"""`python -m kernels.tune [--out FILE] [--family full]`: measure plans for the model's shapes.

For every shape the ways to cut k are timed at few and at more tokens, and the paths at the token
numbers between which they may change. The plans go, with machine and date, into the `measured` list
of `glm_exl3/ops/tuning.json`, in place of earlier ones for the same shape and compute capability.
A plan that the rule would give anyway, within `NOISE`, is left out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ops import cuda_backend, tuning
from glm_exl3.ops.tuning import ANY_NUMBER, Problem, Step
from kernels import inputs
from kernels.cases import EXPERTS, HIDDEN, LIMIT, MCG, MUL1, TOP_K
from kernels.table import ROTATED_BYTES
from kernels.timing import median_us

NOISE = 1.03  # a change must gain more than this
CUTS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
ROUTED_CUTS = (0, 1, 2, 4, 8, 16)
FEW, MORE = (1, 2, 4, 8), (16, 32, 64)
DENSE_SHAPES = ((4096, 24576), (8192, 4096), (1536, 16384), (4096, 2048), (4096, 12288))
ROUTED_WIDTHS = (2048, 1024, 512)
RATES = ((4, MCG), (3, MUL1), (4, MUL1))
HEADS = ((4096, 154880, 6, MCG), (4096, 154880, 6, MUL1))
FULL = (
    *((*shape, 5, MUL1) for shape in ((4096, 2048), (2048, 4096), (8192, 4096), (16384, 4096),
                                      (4096, 1536), (4096, 512), (1536, 2048))),
    *((*shape, 4, MUL1) for shape in ((4096, 24576), (1536, 16384), (4096, 12288), (12288, 4096))),
    HEADS[1],
)  # fmt: skip
"""Dense matrices of the 3.04-bpw checkpoint (`glm_exl3.dummy.geometry`)."""

# Times one step at a number of tokens, microseconds.
Timer = Callable[[Step, int], float]
Case = tuple[Problem, Callable[[], Timer], Callable[[Timer], list[Step]]]


def best_cut(timer: Timer, path: str, tokens: Sequence[int], cuts: Sequence[int]) -> int:
    """The cut of k with the least sum of times relative to the rule's own, which wins near ties."""
    rule = {m: timer(Step(path), m) for m in tokens}
    scores = {0: float(len(tokens)) / NOISE}
    for cut in cuts[1:]:
        scores[cut] = sum(timer(Step(path, split_k=cut), m) / rule[m] for m in tokens)
    return min(scores, key=lambda cut: scores[cut])


def reach(timer: Timer, first: Step, second: Step, tokens: Sequence[int]) -> int:
    """The largest of `tokens`, ascending, up to which `first` is no slower than `second`."""
    good = 0
    for m in tokens:
        if timer(first, m) > timer(second, m) * NOISE:
            break
        good = m
    return good


def dense_plan(timer: Timer) -> list[Step]:
    few, more = (best_cut(timer, tuning.STREAMED, m, CUTS) for m in (FEW, MORE))
    end = reach(timer, Step(tuning.STREAMED, split_k=more), Step(tuning.DECODED), (16, 32, 64))
    steps = [Step(tuning.STREAMED, max(end, 8) if few == more else 8, few)]
    if end > 8 and few != more:
        steps.append(Step(tuning.STREAMED, end, more))
    return [*steps, Step(tuning.DECODED)]


def routed_plan(timer: Timer) -> list[Step]:
    few, more = (best_cut(timer, tuning.STREAMED, m, ROUTED_CUTS) for m in (FEW, MORE))
    streamed = Step(tuning.STREAMED, split_k=more)
    end = max(8, reach(timer, streamed, Step(tuning.TILED), (32, 64, 128, 256)))
    steps = [Step(tuning.STREAMED, end if few == more else 8, few)]
    if end > 8 and few != more:
        steps.append(Step(tuning.STREAMED, end, more))
    return [*steps, Step(tuning.TILED)]


def row_of(problem: Problem, steps: Sequence[Step]) -> dict:
    """A row of the `measured` list."""
    plan = []
    for step in steps:
        entry: dict[str, object] = {"path": step.path}
        if step.tokens != ANY_NUMBER:
            entry["tokens"] = step.tokens
        if step.split_k:
            entry["split_k"] = step.split_k
        plan.append(entry)
    return {
        "machine": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "capability": list(torch.cuda.get_device_capability()),
        **{"op": problem.op, "k": problem.k, "n": problem.n},
        **{"bits": problem.bits, "codebook": problem.codebook},
        "steps": plan,
    }


def _dense_timer(k: int, n: int, bits: int, codebook: Codebook) -> Timer:
    generator = torch.Generator("cuda").manual_seed(k + n)
    count = max(2, min(12, int(ROTATED_BYTES / (k * n * bits / 8)) + 1))
    matrices = [inputs.random_matrix(k, n, 16 * bits, codebook, generator) for _ in range(count)]

    def timer(step: Step, m: int) -> float:
        x = torch.randn(m, k, device="cuda", generator=generator).to(torch.bfloat16)
        return median_us([partial(cuda_backend.linear, x, w, step) for w in matrices], 7)

    return timer


def _routed_timer(width: int, bits: int, codebook: Codebook) -> Timer:
    generator = torch.Generator("cuda").manual_seed(width)
    w13 = inputs.random_stack((EXPERTS, 2), HIDDEN, width, 16 * bits, codebook, generator)
    w2 = inputs.random_stack((EXPERTS,), width, HIDDEN, 16 * bits, codebook, generator)
    stacks = cuda_backend.prepare_moe(w13, w2)

    def timer(step: Step, m: int) -> float:
        same = torch.Generator("cuda").manual_seed(m)
        count = 8 if m <= 8 else 2
        calls = [inputs.random_routing(m, HIDDEN, EXPERTS, TOP_K, same) for _ in range(count)]
        return median_us(
            [
                partial(cuda_backend.moe, c.x, c.ids, c.weights, *stacks, LIMIT, how=step)
                for c in calls
            ],
            7,
        )

    return timer


def cases(family: str) -> list[Case]:
    """What is measured: shapes of one checkpoint's dense matrices, or of all."""
    found: list[Case] = []
    dense = list(FULL)
    if family == "all":
        for width in ROUTED_WIDTHS:
            for bits, codebook in RATES[:2]:
                problem = Problem("moe", HIDDEN, width, bits, codebook.value)
                found.append((problem, partial(_routed_timer, width, bits, codebook), routed_plan))
        dense = [(*shape, *rate) for shape in DENSE_SHAPES for rate in RATES]
        dense = list(dict.fromkeys([*dense, *HEADS, *FULL]))
    for k, n, bits, codebook in dense:
        problem = Problem("linear", k, n, bits, codebook.value)
        found.append((problem, partial(_dense_timer, k, n, bits, codebook), dense_plan))
    return found


def measured(wanted: Sequence[Case]) -> Iterator[dict]:
    """Rows for every shape whose plan differs from the rule's."""
    for problem, make, plan in wanted:
        row = row_of(problem, plan(make()))
        rule = next(rule for rule in tuning.table()["rules"] if rule["op"] == problem.op)
        differs = row["steps"] != rule["steps"]
        print(problem, row["steps"] if differs else "as the rule", flush=True)
        if differs:
            tuning.steps_of(row)
            yield row


def merged(
    table: dict, rows: Sequence[dict], capability: tuple[int, int], tried: Sequence[Problem]
) -> dict:
    """`table` with `rows` in place of what it had for `tried` on this compute capability."""
    kept = [
        row for row in table["measured"]
        if not any(tuning.matches(row, problem, capability) for problem in tried)
    ]  # fmt: skip
    return {**table, "measured": [*kept, *rows]}


def text_of(table: dict) -> str:
    """The data file: one row a line."""

    def block(rows: Sequence[dict]) -> str:
        return ",\n  ".join(json.dumps(row) for row in rows)

    rules, rows = block(table["rules"]), block(table["measured"])
    inner = f"[\n  {rows}\n ]" if rows else "[]"
    return f'{{\n "rules": [\n  {rules}\n ],\n "measured": {inner}\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure plans for the model's shapes.")
    parser.add_argument("--out", type=Path, default=tuning.TABLE)
    parser.add_argument("--family", choices=("all", "full"), default="all")
    options = parser.parse_args()
    table, wanted = json.loads(tuning.TABLE.read_text()), cases(options.family)
    capability, tried = torch.cuda.get_device_capability(), [problem for problem, _, _ in wanted]
    options.out.write_text(text_of(merged(table, list(measured(wanted)), capability, tried)))


if __name__ == "__main__":
    main()
