"""Figures of a trained miniature on held-out text: loss, needle, acceptance, samples.

Everything is computed with the training modules, attention following the indexer's choice as when
served. Acceptance is exact for greedy decoding: the target's greedy continuation is generated
first, then every position is drafted with that text as context, and a walk over it counts what each
step would have accepted (the bonus token not counted).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from nano import kda
from nano.data import Batch, Stream, Streams
from nano.decode import generate
from nano.dialogue import OPEN
from nano.drafter import BLOCK, Drafter, walk
from nano.layers import Selection
from nano.model import Nano, Predictor

SPARSE, DENSE, BLIND = Selection(sparse=True), Selection(), Selection(blind=True)
PROMPT_TOKENS, NEW_TOKENS = 192, 128
QUESTIONS = (
    "What does json.dumps do?",
    "What is the gzip module for?",
    "How do I use os.path.join()?",
    "Who are you?",
)


def mixed(device: torch.device) -> torch.autocast:
    """BF16 autocast on a GPU; on the CPU, where it is slow, none."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def held_out_windows(stream: Stream, length: int, limit: int) -> Tensor:
    """Consecutive windows `[N, length + 1]` of the held-out stream."""
    count = min(limit, (stream.tokens.numel() - 1) // length)
    index = torch.arange(count, device=stream.tokens.device)[:, None] * length
    return stream.tokens[index + torch.arange(length + 1, device=index.device)].long()


def logits_of(target: Nano, tokens: Tensor, selection: Selection) -> Tensor:
    """Logits `[B, T, V]`, BF16 autocast on a GPU; T is padded to whole chunks inside."""
    length = tokens.shape[1]
    padded = F.pad(tokens, (0, -length % kda.CHUNK))
    with mixed(tokens.device):
        hidden = target(padded, selection).hidden[:, :length]
        return F.linear(hidden, target.lm_head.weight.to(hidden.dtype))


def mean_loss(target: Nano, windows: Tensor, selection: Selection) -> float:
    """Mean cross entropy (nats per token) over windows."""
    losses = [
        F.cross_entropy(
            logits_of(target, part[:, :-1], selection).flatten(0, 1).float(), part[:, 1:].flatten()
        )
        for part in windows.split(8)
    ]
    return torch.stack(losses).mean().item()


def needle_share(target: Nano, needles: Batch, selection: Selection) -> float:
    """Share of answers of which every token is the argmax, teacher-forced."""
    right = wrong = 0
    for tokens, weights in zip(needles.tokens.split(8), needles.weights.split(8), strict=True):
        hit = logits_of(target, tokens[:, :-1].long(), selection).argmax(-1) == tokens[:, 1:]
        answer = weights > 1
        first = answer & ~F.pad(answer[:, :-1], (1, 0))
        number = first.cumsum(1) * answer
        for row in range(tokens.shape[0]):
            total = int(number[row].max())
            missed = set(number[row][answer[row] & ~hit[row]].tolist())
            wrong += len(missed)
            right += total - len(missed)
    return right / max(1, right + wrong)


Walks = Sequence[tuple[int, int]]
"""Per text: accepted drafts and steps."""


def accepted(correct: Tensor, begin: int) -> Walks:
    """Walks over correct `[B, T, K]` that start at `begin`."""
    runs = correct.int().cumprod(-1).sum(-1).tolist()
    walks = []
    for row in runs:
        position, total, steps = begin, 0, 0
        while position < len(row):
            total, steps = total + row[position], steps + 1
            position += 1 + row[position]
        walks.append((total, steps))
    return walks


def per_step(walks: Walks) -> float:
    """Mean accepted drafts a step."""
    return sum(total for total, _ in walks) / max(1, sum(steps for _, steps in walks))


def predictor_walks(target: Nano, predictor: Predictor, tokens: Tensor, begin: int) -> Walks:
    """Accepted drafts and steps of two MTP drafts on the greedy texts `[B, T]`."""
    length = tokens.shape[1]
    padded = F.pad(tokens, (0, -length % kda.CHUNK))
    head = target.lm_head.weight
    with mixed(tokens.device):
        state = target(padded, SPARSE).hidden
        embedded = target.embed_tokens(padded).to(state.dtype)
        correct = []
        for step in (1, 2):
            shifted = F.pad(embedded[:, step:], (0, 0, 0, step))
            state = predictor(shifted, state, SPARSE)
            drafts = F.linear(state, head.to(state.dtype)).argmax(-1)
            correct.append(drafts[:, : length - 3] == tokens[:, step + 1 : step + 1 + length - 3])
    return accepted(torch.stack(correct, -1), begin - 1)


def drafter_walks(target: Nano, drafter: Drafter, tokens: Tensor, begin: int) -> Walks:
    """Accepted drafts and steps of seven DFlash2 drafts on the greedy texts `[B, T]`."""
    length = tokens.shape[1]
    padded = F.pad(tokens, (0, -length % kda.CHUNK))
    anchors = torch.arange(begin, length - BLOCK, device=tokens.device)
    with mixed(tokens.device):
        taps = target(padded, SPARSE, want_taps=True).taps
        hidden = drafter(drafter.read(taps), padded, anchors, target.embed_tokens.weight)
        drafts = walk(drafter, hidden, padded[:, anchors], target.lm_head.weight)
    offsets = anchors[:, None] + 1 + torch.arange(BLOCK - 1, device=tokens.device)
    return accepted(drafts == padded[:, offsets], 0)


def answers(
    target: Nano, tokenizer: Tokenizer, device: torch.device, count: int = 96
) -> dict[str, str]:
    """Greedy answers to a few questions in the chat format."""
    texts = [f"{OPEN}<|user|>{question}<|assistant|><think>" for question in QUESTIONS]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    lengths = torch.tensor([len(row) for row in ids], device=device)
    prompts = torch.zeros(len(ids), int(lengths.max()), dtype=torch.long, device=device)
    for row, own in enumerate(ids):
        prompts[row, : len(own)] = torch.tensor(own, device=device)
    made = generate(target, prompts, lengths, prompts.shape[1] + count).tolist()
    return {
        question: tokenizer.decode(made[row][len(ids[row]) :], skip_special_tokens=False)
        for row, question in enumerate(QUESTIONS)
    }


@torch.no_grad()
def evaluate(
    target: Nano,
    predictor: Predictor,
    drafter: Drafter,
    streams: Streams,
    out: Path,
    tokenizer_file: Path,
    windows: int = 96,
    prompts: int = 96,
) -> dict[str, Any]:
    """Compute the figures, write them to `out/evaluation.json` and return them."""
    target.eval(), predictor.eval(), drafter.eval()
    length = streams.needles.weights.shape[1]
    held = held_out_windows(streams.held_out, length, windows)
    few = min(prompts, held.shape[0])
    start = torch.full((few,), PROMPT_TOKENS, device=held.device)
    texts = generate(target, held[:few, :PROMPT_TOKENS], start, PROMPT_TOKENS + NEW_TOKENS)
    parts = texts.split(48)
    mtp = [w for part in parts for w in predictor_walks(target, predictor, part, PROMPT_TOKENS)]
    dflash = [w for part in parts for w in drafter_walks(target, drafter, part, PROMPT_TOKENS)]
    figures = {
        "bf16_loss": mean_loss(target, held, SPARSE),
        "dense_loss": mean_loss(target, held, DENSE),
        "needle": needle_share(target, streams.held_out_needles, SPARSE),
        "needle_dense": needle_share(target, streams.held_out_needles, DENSE),
        "needle_random_pools": needle_share(target, streams.held_out_needles, BLIND),
        "acceptance_mtp": per_step(mtp),
        "acceptance_dflash": per_step(dflash),
        "held_out_tokens": held[:, 1:].numel(),
    }
    print(json.dumps(figures), flush=True)
    figures |= {"walks_mtp": mtp, "walks_dflash": dflash}
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    figures["answers"] = answers(target, tokenizer, held.device)
    figures["samples"] = [tokenizer.decode(row[150:].tolist()) for row in texts[:4]]
    (out / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps([figures["answers"], figures["samples"][:2]], indent=1), flush=True)
    return figures
