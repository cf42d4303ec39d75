"""Train the drafter against the frozen target, on the target's own greedy texts.

`python -m nano.draft --resume DIR --scratch FILE --tokenizer FILE --out DIR --seconds 150`. Drafts
are accepted where they agree with what the target says, so that is what the drafter learns from:
prompts of documents and conversations are continued greedily, and at every anchor the seven
following tokens are the target's own. A little of the corpus's text, with the target's predictions
for it, keeps the drafter useful where text is given.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nano import data
from nano.checkpoint import load_training, save_drafter
from nano.decode import generate
from nano.drafter import BLOCK, Drafter, DrafterGeometry, draft_losses
from nano.evaluate import evaluate
from nano.geometry import nano_geometry
from nano.layers import Selection
from nano.model import Nano, Predictor
from nano.optimiser import Optimiser
from nano.schedule import clock, log, ramp

RATES = (0.02, 0.002)
SHARPNESS = 2.5


@dataclass(frozen=True)
class Rounds:
    """The time budget, where the log goes, and what the drafter learns from.

    `batches` batches of `rows` texts of `length` tokens are continued from prompts of 16 to
    `prompt` tokens, one in `chats` of them conversations; a training step takes `step_rows`.
    """

    seconds: float
    out: Path
    batches: int = 4
    rows: int = 2048
    length: int = 448
    prompt: int = 192
    step_rows: int = 40
    part: int = 0
    peak: float = 1.0
    chats: int = 2


def greedy_texts(
    target: Nano, streams: data.Streams, rounds: Rounds, generator: torch.Generator
) -> Tensor:
    """Prompts with the target's greedy continuations, `[rows, length]`."""
    asked = rounds.rows // rounds.chats
    prompts = torch.cat(
        [
            streams.documents.windows(rounds.rows - asked, rounds.prompt, generator),
            streams.chats.windows(asked, rounds.prompt, generator),
        ]
    )
    lengths = torch.randint(
        16, rounds.prompt + 1, (rounds.rows,), generator=generator, device=prompts.device
    )
    return generate(target, prompts, lengths, rounds.length)


@torch.no_grad()
def cached_rows(
    target: Nano, drafter: Drafter, streams: data.Streams, rounds: Rounds
) -> list[Tensor]:
    """Tokens `[N, T]`, last hidden `[N, T, H]` and the taps that the drafter reads."""
    device = streams.documents.tokens.device
    generator = torch.Generator(device).manual_seed(6 + 100 * rounds.part)
    parts: list[list[Tensor]] = []
    for number in range(rounds.batches):
        begin = time.monotonic()
        texts = greedy_texts(target, streams, rounds, generator)
        given = streams.documents.windows(rounds.rows // 8, rounds.length, generator)
        for tokens in torch.cat([texts, given]).split(128):
            with torch.autocast(device.type, torch.bfloat16):
                outputs = target(tokens, Selection(sparse=True), want_taps=True)
            parts.append([tokens.short(), outputs.hidden, *drafter.read(outputs.taps)])
        if number == 0:
            print(f"greedy texts: {time.monotonic() - begin:.1f} s a batch", flush=True)
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def train_drafter(target: Nano, drafter: Drafter, streams: data.Streams, rounds: Rounds) -> None:
    """Fit the drafter to the target's sharpened predictions for the seven tokens of each block."""
    begin = time.monotonic()
    device = streams.documents.tokens.device
    optimiser = Optimiser([drafter], RATES)
    target.eval()
    drafter.train()
    head, embedding = target.lm_head.weight.detach(), target.embed_tokens.weight.detach()
    cached = cached_rows(target, drafter, streams, rounds)
    generator = torch.Generator(device).manual_seed(7 + 100 * rounds.part)
    left = rounds.seconds - (time.monotonic() - begin)
    for count, progress in enumerate(clock(left)):
        pick = torch.randint(
            len(cached[0]), (rounds.step_rows,), generator=generator, device=device
        )
        tokens, hidden, *taps = (part[pick] for part in cached)
        anchors = torch.randperm(rounds.length - 3 * BLOCK, generator=generator, device=device)
        anchors = anchors[: rounds.length // BLOCK].sort().values + 2 * BLOCK
        with torch.autocast(device.type, torch.bfloat16):
            offsets = anchors[:, None] + torch.arange(BLOCK - 1, device=device)
            teacher = SHARPNESS * F.linear(hidden[:, offsets], head.to(hidden.dtype)).float()
            drafted = drafter(taps, tokens.long(), anchors, embedding)
            unary, paired = draft_losses(drafter, drafted, tokens.long(), anchors, teacher, head)
        (0.5 * unary + paired).backward()
        optimiser.step(rounds.peak * ramp(progress, 0.03, 0.3))
        if count % 50 == 0:
            log(rounds.out, "drafter", count, progress, {"unary": unary, "paired": paired})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name in ("resume", "scratch", "tokenizer", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--peak", type=float, default=1.0)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--chats", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    given = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(13 + given.part)
    torch.set_float32_matmul_precision("high")
    geometry = nano_geometry()
    target, predictor = Nano(geometry.text).to(device), Predictor(geometry.text).to(device)
    drafter = Drafter(DrafterGeometry.of(geometry)).to(device)
    load_training(given.resume, target, predictor, drafter)
    streams = data.loaded(given.scratch, device)
    rounds = Rounds(
        given.seconds,
        given.out,
        batches=given.batches,
        rows=given.rows,
        part=given.part,
        peak=given.peak,
        chats=given.chats,
    )
    train_drafter(target, drafter, streams, rounds)
    save_drafter(given.out, drafter)
    evaluate(target, predictor, drafter, streams, given.out, given.tokenizer)


if __name__ == "__main__":
    main()
