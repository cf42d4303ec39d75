"""Traces by the miniature's training modules on its packed weights: seconds instead of an engine.

The modules write a text first, then draft at every position of it, as `nano.evaluate` does for its
acceptance. They differ from the engine by rounding only; `tests/bench` and the model card compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from e2e.traces import Trace
from glm_exl3.ref.tiny.twin import read_tensors
from nano import kda
from nano.checkpoint import fill
from nano.decode import generate
from nano.drafter import BLOCK, Drafter, DrafterGeometry, walk
from nano.evaluate import SPARSE
from nano.geometry import nano_geometry
from nano.model import Nano, Predictor
from nano.restore import decoded_target


class Modules:
    """Target and drafter of a folder of the miniature, on the CPU."""

    def __init__(self, folder: Path, drafter: Path) -> None:
        geometry = nano_geometry()
        self.target, predictor = Nano(geometry.text).eval(), Predictor(geometry.text).eval()
        fill(decoded_target(folder), self.target, predictor)
        self.drafter = Drafter(DrafterGeometry.of(geometry)).eval()
        self.drafter.load_state_dict(read_tensors(drafter))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @torch.no_grad()
    def record(self, texts: Sequence[str], tokens: int, temperature: float) -> list[Trace]:
        """One trace per text, `tokens` long; all texts are written at once."""
        ids = [self.tokenizer.encode(text).ids for text in texts]
        lengths = torch.tensor([len(row) for row in ids])
        prompts = torch.zeros(len(ids), int(lengths.max()), dtype=torch.long)
        for row, own in enumerate(ids):
            prompts[row, : len(own)] = torch.tensor(own)
        torch.manual_seed(1)
        made = generate(
            self.target, prompts, lengths, prompts.shape[1] + tokens, temperature, torch.float32
        )
        found = []
        for row, own in zip(made, ids, strict=True):
            whole = row[: len(own) + tokens]
            found.append(Trace(whole.tolist(), len(own), self.drafts(whole[None], len(own))))
        return found

    def drafts(self, text: torch.Tensor, prompt: int) -> dict[int, list[int]]:
        """Drafts by position of `text` `[1, T]` from its first answered token on."""
        length = text.shape[1]
        padded = torch.nn.functional.pad(text, (0, BLOCK + -(length + BLOCK) % kda.CHUNK))
        anchors = torch.arange(prompt, length)
        taps = self.target(padded, SPARSE, want_taps=True).taps
        hidden = self.drafter(
            self.drafter.read(taps), padded, anchors, self.target.embed_tokens.weight
        )
        drafts = walk(self.drafter, hidden, padded[:, anchors], self.target.lm_head.weight)
        return {prompt + 1 + i: row for i, row in enumerate(drafts[0].tolist())}
