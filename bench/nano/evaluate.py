"""Figures of a trained miniature on held-out text: loss, needle, acceptance, samples.

Everything is computed with the training modules, attention following the indexer's choice as when
served. Acceptance is exact for greedy decoding: the target's greedy continuation is generated
first, then every position is drafted with that text as context, and a walk over it counts what each
step would have accepted (the bonus token not counted).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from nano import kda
from nano.data import Batch, Stream, Streams
from nano.dialogue import OPEN
from nano.drafter import BLOCK, Drafter, walk
from nano.layers import Selection
from nano.model import Nano, Predictor

SPARSE, DENSE, BLIND = Selection(sparse=True), Selection(), Selection(blind=True)
QUESTIONS = (
    "What does json.dumps do?",
    "What is the gzip module for?",
    "How do I use os.path.join()?",
    "Who are you?",
)


def held_out_windows(stream: Stream, length: int, limit: int) -> Tensor:
    """Consecutive windows `[N, length + 1]` of the held-out stream."""
    count = min(limit, (stream.tokens.numel() - 1) // length)
    index = torch.arange(count, device=stream.tokens.device)[:, None] * length
    return stream.tokens[index + torch.arange(length + 1, device=index.device)].long()


def logits_of(target: Nano, tokens: Tensor, selection: Selection) -> Tensor:
    """Logits `[B, T, V]` under bf16 autocast; T is padded to whole chunks inside."""
    length = tokens.shape[1]
    padded = F.pad(tokens, (0, -length % kda.CHUNK))
    with torch.autocast(tokens.device.type, torch.bfloat16):
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


def continued(target: Nano, prompts: Tensor, count: int, temperature: float = 0.0) -> Tensor:
    """Prompts `[B, P]` with `count` more tokens, without a cache."""
    tokens = prompts
    for _ in range(count):
        last = logits_of(target, tokens, SPARSE)[:, -1].float()
        if temperature > 0:
            token = torch.multinomial((last / temperature).softmax(-1), 1)
        else:
            token = last.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, token], dim=1)
    return tokens


def accepted_per_step(correct: Tensor, begin: int) -> float:
    """Mean accepted drafts a step: correct `[B, T, K]`, walks start at `begin`."""
    runs = correct.int().cumprod(-1).sum(-1).tolist()
    taken = []
    for row in runs:
        position = begin
        while position < len(row):
            taken.append(row[position])
            position += 1 + row[position]
    return sum(taken) / max(1, len(taken))


def predictor_acceptance(target: Nano, predictor: Predictor, tokens: Tensor, begin: int) -> float:
    """Accepted drafts a step of two MTP drafts on the greedy texts `[B, T]`."""
    length = tokens.shape[1]
    padded = F.pad(tokens, (0, -length % kda.CHUNK))
    head = target.lm_head.weight
    with torch.autocast(tokens.device.type, torch.bfloat16):
        state = target(padded, SPARSE).hidden
        embedded = target.embed_tokens(padded).to(state.dtype)
        correct = []
        for step in (1, 2):
            shifted = F.pad(embedded[:, step:], (0, 0, 0, step))
            state = predictor(shifted, state, SPARSE)
            drafts = F.linear(state, head.to(state.dtype)).argmax(-1)
            correct.append(drafts[:, : length - 3] == tokens[:, step + 1 : step + 1 + length - 3])
    return accepted_per_step(torch.stack(correct, -1), begin - 1)


def drafter_acceptance(target: Nano, drafter: Drafter, tokens: Tensor, begin: int) -> float:
    """Accepted drafts a step of seven DFlash2 drafts on the greedy texts `[B, T]`."""
    length = tokens.shape[1]
    padded = F.pad(tokens, (0, -length % kda.CHUNK))
    anchors = torch.arange(begin, length - BLOCK, device=tokens.device)
    with torch.autocast(tokens.device.type, torch.bfloat16):
        taps = target(padded, SPARSE, want_taps=True).taps
        hidden = drafter(taps, padded, anchors, target.embed_tokens.weight)
        drafts = walk(drafter, hidden, padded[:, anchors], target.lm_head.weight)
    offsets = anchors[:, None] + 1 + torch.arange(BLOCK - 1, device=tokens.device)
    return accepted_per_step(drafts == padded[:, offsets], 0)


def answers(
    target: Nano, tokenizer: Tokenizer, device: torch.device, count: int = 96
) -> dict[str, str]:
    """Greedy answers to a few questions in the chat format."""
    result = {}
    for question in QUESTIONS:
        text = f"{OPEN}<|user|>{question}<|assistant|><think>"
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokens = continued(target, torch.tensor([ids], device=device), count)
        result[question] = tokenizer.decode(
            tokens[0, len(ids) :].tolist(), skip_special_tokens=False
        )
    return result


@torch.no_grad()
def evaluate(
    target: Nano,
    predictor: Predictor,
    drafter: Drafter,
    streams: Streams,
    out: Path,
    tokenizer_file: Path,
    windows: int = 96,
    prompts: int = 48,
) -> dict[str, Any]:
    """Compute the figures, write them to `out/evaluation.json` and return them."""
    target.eval(), predictor.eval(), drafter.eval()
    length = streams.needles.weights.shape[1]
    held = held_out_windows(streams.held_out, length, windows)
    few = min(prompts, held.shape[0])
    texts = continued(target, held[:few, :192], 128)
    figures = {
        "bf16_loss": mean_loss(target, held, SPARSE),
        "dense_loss": mean_loss(target, held, DENSE),
        "needle": needle_share(target, streams.held_out_needles, SPARSE),
        "needle_dense": needle_share(target, streams.held_out_needles, DENSE),
        "needle_random_pools": needle_share(target, streams.held_out_needles, BLIND),
        "acceptance_mtp": predictor_acceptance(target, predictor, texts, 192),
        "acceptance_dflash": drafter_acceptance(target, drafter, texts, 192),
        "held_out_tokens": held[:, 1:].numel(),
    }
    print(json.dumps(figures), flush=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    figures["answers"] = answers(target, tokenizer, held.device)
    figures["samples"] = [tokenizer.decode(row[150:].tolist()) for row in texts[:4]]
    (out / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps([figures["answers"], figures["samples"][:2]], indent=1), flush=True)
    return figures
