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
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nano import data, model, speed
from nano.checkpoint import load_training, save_training
from nano.draft import Rounds, train_drafter
from nano.drafter import Drafter, DrafterGeometry
from nano.evaluate import evaluate
from nano.geometry import nano_geometry
from nano.layers import Selection
from nano.model import Nano, Predictor
from nano.optimiser import Optimiser
from nano.schedule import clock, log, ramp

TEACH_ROWS = 4
TARGET_RATES = (0.02, 0.003)
PREDICTOR_RATES = (0.02, 0.003)
SAVE_EVERY_S = 60.0
SHARES = [n / 100 for n in range(100)]


@dataclass(frozen=True)
class Stages:
    """When, in shares of the target's budget, what joins, and how high the learning rates go.

    At `join` the MTP block and the indexer's loss join, from `sparse` on attention follows the
    indexer. `peak` is a factor on all rates, held until the share `hold`. `part` numbers the runs
    of one training, so that a resumed run draws other batches.
    """

    join: float = 0.45
    sparse: float = 0.78
    peak: float = 1.0
    hold: float = 0.4
    part: int = 0


@dataclass(frozen=True)
class Plan:
    """What a run does: rows of each kind a step, their length, time budgets, output folder."""

    rows: tuple[int, int, int]
    length: int
    seconds: float
    out: Path
    device: torch.device
    stages: Stages


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
    target: Nano, predictor: Predictor, batch: data.Batch, joined: bool, sparse: bool
) -> dict[str, Tensor]:
    """Forward and backward of one batch; returns the losses to log."""
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
    stages = plan.stages
    generator = torch.Generator(plan.device).manual_seed(5 + 100 * stages.part)
    main, side = Optimiser([target], TARGET_RATES), Optimiser([predictor], PREDICTOR_RATES)
    target.train()
    predictor.train()
    saved = time.monotonic()
    for count, progress in enumerate(clock(plan.seconds)):
        batch = data.batch(streams, plan.rows, plan.length, generator)
        joined = progress >= stages.join
        logged = target_step(target, predictor, batch, joined, progress >= stages.sparse)
        main.step(stages.peak * ramp(progress, 0.02, stages.hold))
        for moe in target.moes():
            moe.gate.balance(1e-3)
        if joined:
            own = (progress - stages.join) / (1 - stages.join)
            side.step(stages.peak * ramp(own, 0.04, stages.hold))
            predictor.mlp.gate.balance(1e-3)
        if count % 25 == 0:
            log(plan.out, "target", count, progress, logged)
        if time.monotonic() - saved > SAVE_EVERY_S:
            save_training(plan.out, target, predictor, None)
            saved = time.monotonic()


def warm_up(target: Nano, predictor: Predictor, plan: Plan) -> None:
    """Compile everything on random tokens, in each stage of the run, and time one step."""
    rows = sum(plan.rows)
    tokens = torch.randint(target.geometry.vocab_size, (rows, plan.length + 1), device=plan.device)
    batch = data.Batch(tokens, torch.full((rows, plan.length), 2.0, device=plan.device))
    stages = {(share >= plan.stages.join, share >= plan.stages.sparse) for share in SHARES}
    for joined, sparse in [stage for stage in sorted(stages) for _ in range(2)]:
        begin = time.monotonic()
        target_step(target, predictor, batch, joined, sparse)
        if plan.device.type == "cuda":
            torch.cuda.synchronize()
        print(f"warm-up {joined=} {sparse=}: {time.monotonic() - begin:.2f} s", flush=True)
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
    for name, default in asdict(Stages()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def main() -> None:
    given = parse()
    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.out.mkdir(parents=True, exist_ok=True)
    stages = Stages(**{name: getattr(given, name) for name in asdict(Stages())})
    plan = Plan(tuple(given.rows), given.length, given.seconds, given.out, device, stages)
    prepare = [sys.executable, "-m", "nano.data", given.corpus, given.tokenizer, given.scratch,
               str(given.length), str(given.needles), str(given.every)]  # fmt: skip
    reading = subprocess.Popen(prepare)
    torch.manual_seed(11 + given.part)
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
    if given.drafter_seconds <= 0:
        return
    train_drafter(target, drafter, streams, Rounds(given.drafter_seconds, plan.out))
    save_training(plan.out, target, predictor, drafter)
    evaluate(target, predictor, drafter, streams, plan.out, given.tokenizer)
    print(f"done after {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
