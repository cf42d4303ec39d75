"""Train the miniature: target, MTP block and indexer together, then the drafter.

`python -m nano.train --corpus DIR --tokenizer FILE --out DIR --seconds 330 --drafter-seconds 60`
runs by the clock: every schedule is a function of the share of its time budget that has passed, so
that a run uses a lent machine fully and always ends annealed. The order within the target's budget:
dense attention only; then the MTP block (on detached hidden states) and the indexer's KL loss join;
at the end attention follows the indexer's choice, as it does when served. Checkpoint shards are
written every minute and at the end; `--resume DIR` starts from such shards.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nano import data, model, speed
from nano.checkpoint import load_training, save_training
from nano.drafter import BLOCK, Drafter, DrafterGeometry, draft_losses
from nano.evaluate import evaluate
from nano.geometry import nano_geometry
from nano.layers import Selection
from nano.model import Nano, Predictor
from nano.optimiser import Muon, split_parameters

JOIN = 0.45
SPARSE = 0.78
TEACH_ROWS = 4
TARGET_RATES = (0.02, 0.003)
PREDICTOR_RATES = (0.02, 0.003)
DRAFTER_RATES = (0.02, 0.002)
DRAFTER_ROWS = 8
SAVE_EVERY_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What a run does: rows of each kind a step, their length, time budgets, output folder."""

    rows: tuple[int, int, int]
    length: int
    seconds: float
    drafter_seconds: float
    out: Path
    device: torch.device
    cached_batches: int = 120


def ramp(progress: float, warm: float, hold: float) -> float:
    """Learning-rate factor: linear warm-up to `warm`, flat to `hold`, linear to 2 % at 1."""
    if progress < warm:
        return progress / warm
    return max(0.02, min(1.0, (1.0 - progress) / (1.0 - hold)))


class Optimiser:
    """Muon and Adam over one or more modules, stepped with one factor."""

    def __init__(self, modules: list[nn.Module], rates: tuple[float, float]) -> None:
        split = [split_parameters(module) for module in modules]
        self.rates = rates
        self.muon = Muon([p for matrices, _ in split for p in matrices])
        rest = [p for _, others in split for p in others]
        self.adam = torch.optim.Adam(rest, betas=(0.9, 0.98), eps=1e-10, fused=rest[0].is_cuda)
        self.modules = modules

    def step(self, factor: float) -> None:
        """Apply the gradients and clear them."""
        self.muon.step(self.rates[0] * factor, decay=0.02)
        for group in self.adam.param_groups:
            group["lr"] = self.rates[1] * factor
        self.adam.step()
        for module in self.modules:
            module.zero_grad(set_to_none=True)


def clock(seconds: float) -> Iterator[float]:
    """Yield the share of the time budget used, until it is used up."""
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < seconds:
        yield passed / seconds


def predictor_loss(
    target: Nano, predictor: Predictor, hidden: Tensor, tokens: Tensor, selection: Selection
) -> Tensor:
    """Cross entropy of two MTP steps to the target's own predictions.

    hidden `[B, T, H]` are the target's (detached); step 1 reads the token at t + 1 and predicts
    t + 2; step 2 reads its own state and the token at t + 2. Tokens `[B, T + 1]`.
    """
    head = target.lm_head.weight.detach()
    with torch.no_grad():
        wanted = F.linear(hidden, head.to(hidden.dtype)).float().softmax(-1)
        embedded = target.embed_tokens(tokens).to(hidden.dtype)
    loss = hidden.new_zeros((), dtype=torch.float32)
    state = hidden
    for step, weight in ((1, 0.7), (2, 0.3)):
        length = hidden.shape[1]
        shifted = F.pad(embedded[:, step:], (0, 0, 0, step - 1))[:, :length]
        state = predictor(shifted, state, selection)
        logits = F.linear(state[:, : length - step], head.to(state.dtype)).float()
        loss = loss - weight * (wanted[:, step:] * logits.log_softmax(-1)).sum(-1).mean()
        if selection.loss is not None and step == 1:
            loss = loss + selection.loss
            selection = Selection(sparse=selection.sparse)
    return loss


def target_step(
    target: Nano, predictor: Predictor, batch: data.Batch, progress: float
) -> dict[str, Tensor]:
    """Forward and backward of one batch; returns the losses to log."""
    joined, sparse = progress >= JOIN, progress >= SPARSE
    tokens = batch.tokens
    selection = Selection(sparse=sparse, teach=TEACH_ROWS if joined else 0)
    with torch.autocast(tokens.device.type, torch.bfloat16):
        hidden = target(tokens[:, :-1], selection).hidden
        each = model.token_losses(
            hidden.flatten(0, 1), target.lm_head.weight, tokens[:, 1:].flatten()
        )
        each = each.view_as(batch.weights)
        plain = (each * batch.weights).sum() / batch.weights.sum()
        answers = (batch.weights[-1] > 1).float()
        needle = (each[-1].detach() * answers).sum() / answers.sum().clamp_min(1)
        total, logged = plain, {"loss": plain.detach(), "needle": needle}
        if joined and selection.loss is not None:
            half = slice(None, None, 2)
            follow = Selection(sparse=sparse, teach=max(1, TEACH_ROWS // 2))
            drafted = predictor_loss(target, predictor, hidden[half].detach(), tokens[half], follow)
            total = total + drafted + selection.loss
            assert selection.recall is not None
            logged |= {
                "mtp": drafted.detach(),
                "index": selection.loss.detach(),
                "recall": selection.recall,
            }
    total.backward()
    return logged


def train_target(target: Nano, predictor: Predictor, streams: data.Streams, plan: Plan) -> None:
    """The first phase: everything the target and the MTP block consist of."""
    generator = torch.Generator(plan.device).manual_seed(5)
    main, side = Optimiser([target], TARGET_RATES), Optimiser([predictor], PREDICTOR_RATES)
    target.train()
    predictor.train()
    saved = time.monotonic()
    for count, progress in enumerate(clock(plan.seconds)):
        batch = data.batch(streams, plan.rows, plan.length, generator)
        logged = target_step(target, predictor, batch, progress)
        main.step(ramp(progress, 0.02, 0.4))
        for moe in target.moes():
            moe.gate.balance(1e-3)
        if progress >= JOIN:
            side.step(ramp((progress - JOIN) / (1 - JOIN), 0.04, 0.4))
            predictor.mlp.gate.balance(1e-3)
        if count % 25 == 0:
            log(plan, "target", count, progress, logged)
        if time.monotonic() - saved > SAVE_EVERY_S:
            save_training(plan.out, target, predictor, None)
            saved = time.monotonic()


def train_drafter(target: Nano, drafter: Drafter, streams: data.Streams, plan: Plan) -> None:
    """The second phase: the drafter against the frozen target's cached hidden states."""
    begin = time.monotonic()
    generator = torch.Generator(plan.device).manual_seed(6)
    optimiser = Optimiser([drafter], DRAFTER_RATES)
    target.eval()
    drafter.train()
    head, embedding = target.lm_head.weight.detach(), target.embed_tokens.weight.detach()
    cached = cached_rows(target, streams, plan, generator)
    for count, progress in enumerate(clock(plan.drafter_seconds - (time.monotonic() - begin))):
        pick = torch.randint(
            len(cached[0]), (DRAFTER_ROWS,), generator=generator, device=plan.device
        )
        tokens, hidden, *taps = (part[pick] for part in cached)
        anchors = torch.randperm(plan.length - 2 * BLOCK, generator=generator, device=plan.device)
        anchors = anchors[: plan.length // BLOCK].sort().values + BLOCK
        with torch.autocast(plan.device.type, torch.bfloat16):
            offsets = anchors[:, None] + torch.arange(BLOCK - 1, device=plan.device)
            teacher = F.linear(hidden[:, offsets], head.to(hidden.dtype))
            drafted = drafter(taps, tokens.long(), anchors, embedding)
            unary, paired = draft_losses(drafter, drafted, tokens.long(), anchors, teacher, head)
        (0.5 * unary + paired).backward()
        optimiser.step(ramp(progress, 0.03, 0.4))
        if count % 50 == 0:
            log(plan, "drafter", count, progress, {"unary": unary, "paired": paired})


@torch.no_grad()
def cached_rows(
    target: Nano, streams: data.Streams, plan: Plan, generator: torch.Generator
) -> list[Tensor]:
    """Tokens `[N, T]`, last hidden and taps `[N, T, H]` of the target on training rows."""
    parts: list[list[Tensor]] = []
    for _ in range(plan.cached_batches):
        tokens = data.batch(streams, plan.rows, plan.length, generator).tokens[:, :-1]
        with torch.autocast(plan.device.type, torch.bfloat16):
            outputs = target(tokens, Selection(sparse=True), want_taps=True)
        parts.append([tokens.short(), outputs.hidden, *outputs.taps])
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def log(plan: Plan, phase: str, step: int, progress: float, values: dict[str, Tensor]) -> None:
    """Append one line to the run's log and print it."""
    numbers = {name: round(float(value.detach()), 4) for name, value in values.items()}
    if not all(math.isfinite(number) for number in numbers.values()):
        raise SystemExit(f"{phase}: not finite at step {step}: {numbers}")
    record = {"phase": phase, "step": step, "progress": round(progress, 4), **numbers}
    with (plan.out / "log.jsonl").open("a") as stream:
        stream.write(json.dumps(record) + "\n")
    if step % 200 == 0:
        print(f"{time.monotonic():.0f} {record}", flush=True)


def warm_up(target: Nano, predictor: Predictor, plan: Plan) -> None:
    """Compile everything on random tokens, in each of the three stages, and time one step."""
    rows = sum(plan.rows)
    tokens = torch.randint(target.geometry.vocab_size, (rows, plan.length + 1), device=plan.device)
    batch = data.Batch(tokens, torch.full((rows, plan.length), 2.0, device=plan.device))
    for progress in (0.0, 0.0, JOIN, JOIN, SPARSE, SPARSE):
        begin = time.monotonic()
        target_step(target, predictor, batch, progress)
        if plan.device.type == "cuda":
            torch.cuda.synchronize()
        print(f"warm-up at {progress}: {time.monotonic() - begin:.2f} s", flush=True)
    for module in (target, predictor):
        module.zero_grad(set_to_none=True)
    for moe in [*target.moes(), predictor.mlp]:
        moe.gate.load.zero_()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True, help="prepared token file")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--drafter-seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=int, nargs=3, default=(10, 4, 2))
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--needles", type=int, default=4000)
    parser.add_argument("--every", type=int, default=1, help="keep one document in so many")
    parser.add_argument("--eager", action="store_true")
    return parser.parse_args()


def main() -> None:
    given = parse()
    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        tuple(given.rows), given.length, given.seconds, given.drafter_seconds, given.out, device
    )
    prepare = [sys.executable, "-m", "nano.data", given.corpus, given.tokenizer, given.scratch,
               str(given.length), str(given.needles), str(given.every)]  # fmt: skip
    reading = subprocess.Popen(prepare)
    torch.manual_seed(11)
    torch.set_float32_matmul_precision("high")
    restore = speed.compile_hot_functions() if not given.eager else None
    geometry = nano_geometry()
    target, predictor = Nano(geometry.text).to(device), Predictor(geometry.text).to(device)
    drafter = Drafter(DrafterGeometry.of(geometry)).to(device)
    if given.resume:
        load_training(given.resume, target, predictor, drafter)
    try:
        warm_up(target, predictor, plan)
    except Exception as error:
        if restore is None:
            raise
        print(f"compiling failed, going on without: {str(error)[:500]}", flush=True)
        restore()
        warm_up(target, predictor, plan)
    if reading.wait():
        raise SystemExit("reading the corpus failed")
    streams = data.loaded(given.scratch, device)
    print(f"start after {time.monotonic() - begin:.0f} s", flush=True)
    train_target(target, predictor, streams, plan)
    save_training(plan.out, target, predictor, None)
    if restore is not None:
        restore()
    train_drafter(target, drafter, streams, plan)
    save_training(plan.out, target, predictor, drafter)
    evaluate(target, predictor, drafter, streams, plan.out, given.tokenizer)
    print(f"done after {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
