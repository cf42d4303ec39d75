"""The small panel of held-out text that the engine is tested on, and its measured noise.

`python -m nano.panel make STREAMS PANEL` writes the panel: prompts to continue, registers whose
keys are asked for, texts to score. `python -m nano.panel measure SHARDS MODEL PANEL OUT` measures
it with the training modules, BF16 and each packed folder below MODEL: the loss of every text, and
the drafts accepted after every prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm_exl3.ref.tiny.twin import read_tensors
from nano import data
from nano.checkpoint import fill, load_shards
from nano.decode import generate
from nano.drafter import Drafter, DrafterGeometry
from nano.evaluate import SPARSE, Walks, drafter_walks, logits_of, per_step, predictor_walks
from nano.geometry import nano_geometry
from nano.model import Nano, Predictor
from nano.packing import RECIPES
from nano.restore import decoded_target

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 24, 192, 96
TEXTS, TEXT_TOKENS = 16, 512
NEEDLES = 6

Models = tuple[Nano, Predictor, Drafter]


def spread(tokens: Tensor, count: int, length: int, offset: int) -> list[list[int]]:
    """Windows at equal distances over the stream."""
    step = (tokens.numel() - length - offset) // count
    return [tokens[offset + n * step :][:length].tolist() for n in range(count)]


def needles(rows: data.Batch) -> list[dict[str, Any]]:
    """Each row up to its first answer, and that answer."""
    found = []
    for tokens, weights in zip(rows.tokens.tolist(), rows.weights.tolist(), strict=True):
        begin = next(n for n, weight in enumerate(weights) if weight > 1)
        end = next((n for n in range(begin, len(weights)) if weights[n] <= 1), len(weights))
        found.append({"prompt": tokens[: begin + 1], "answer": tokens[begin + 1 : end + 1]})
    return found


def made(streams: data.Streams) -> dict[str, Any]:
    """The panel: `prompts`, `texts` (token lists) and `needles` (prompt and answer)."""
    held = streams.held_out.tokens
    asked = data.Batch(*(part[:NEEDLES] for part in streams.held_out_needles))
    return {
        "prompts": spread(held, PROMPTS, PROMPT_TOKENS, 700),
        "needles": needles(asked),
        "texts": spread(held, TEXTS, TEXT_TOKENS, 5000),
    }


@torch.no_grad()
def losses(target: Nano, texts: list[list[int]], device: torch.device) -> list[float]:
    """Mean negative log probability (nats a token) of each text after its first token."""
    tokens = torch.tensor(texts, device=device)
    each = F.cross_entropy(
        logits_of(target, tokens[:, :-1], SPARSE).float().transpose(1, 2),
        tokens[:, 1:],
        reduction="none",
    )
    return [round(value, 6) for value in each.mean(-1).tolist()]


@torch.no_grad()
def walks(models: Models, prompts: list[list[int]], device: torch.device) -> dict[str, Walks]:
    """Accepted drafts and steps after every prompt, MTP and DFlash2, on the model's own text."""
    target, predictor, drafter = models
    tokens = torch.tensor(prompts, device=device)
    lengths = torch.full((len(prompts),), PROMPT_TOKENS, device=device)
    texts = generate(target, tokens, lengths, PROMPT_TOKENS + NEW_TOKENS)
    return {
        "mtp": predictor_walks(target, predictor, texts, PROMPT_TOKENS),
        "dflash": drafter_walks(target, drafter, texts, PROMPT_TOKENS),
    }


def measured(shards: Path, models: Path, panel: dict[str, Any]) -> dict[str, Any]:
    """`losses` by text, `mtp` and `dflash` (accepted, steps) by prompt, of every model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    geometry = nano_geometry()
    target, predictor = Nano(geometry.text).to(device), Predictor(geometry.text).to(device)
    drafter = Drafter(DrafterGeometry.of(geometry)).to(device)
    drafter.load_state_dict(read_tensors(models / "drafter"))
    every = target.eval(), predictor.eval(), drafter.eval()
    found: dict[str, Any] = {}
    for name in ("bf16", *RECIPES):
        bf16 = name == "bf16"
        tensors = load_shards(shards, "target-") if bf16 else decoded_target(models / name, device)
        fill(tensors, target, predictor)
        found[name] = {"losses": losses(target, panel["texts"], device)}
        found[name] |= walks(every, panel["prompts"], device)
        print(name, {key: per_step(found[name][key]) for key in ("mtp", "dflash")}, flush=True)
    return found


def main() -> None:
    if sys.argv[1] == "make":
        streams = data.loaded(Path(sys.argv[2]), torch.device("cpu"))
        Path(sys.argv[3]).write_text(json.dumps(made(streams), separators=(",", ":")) + "\n")
        return
    shards, models, panel, out = map(Path, sys.argv[2:])
    result = measured(shards, models, json.loads(panel.read_text()))
    out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
