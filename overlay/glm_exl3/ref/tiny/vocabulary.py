"""The successor structure of the vocabulary, which makes drafts predictable about half of the time.

What: every token has a successor in its cluster of eight, and the clusters are closed cycles. The
language model's head reads the successor of the newest token from its residual stream, its layers
disturb that, and a drafter that only knows the cycle is right until the model leaves it. Why
constructed: acceptance between 20 and 80 % without training, the same on every machine.

What must stay true: tokens that would break text (control tokens, bytes beyond ASCII) belong to no
cycle: their successor lies in one, and their head rows are quiet, so they are hardly generated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm_exl3.ref.tiny.recipe import RandomStreams
from glm_exl3.ref.tiny.tokenizer import vocabulary

CLUSTER = 8
QUIET = 0.1
_EAGER = {"</think>": 1.25, "<|endoftext|>": 1.0}


@dataclass(frozen=True)
class Successors:
    """successor int64 `[V]`, cluster int64 `[V]` in `[0, clusters)`, loudness fp32 `[V]`.

    `loudness` scales a token's head row: how likely it is to be generated at all.
    """

    successor: Tensor
    cluster: Tensor
    loudness: Tensor
    clusters: int


def _printable(text: str) -> bool:
    return all(" " < char <= "~" or char in "ĠĊ" for char in text)


def successors(streams: RandomStreams) -> Successors:
    """The cycles of one seed over the committed tokenizer's vocabulary."""
    entries = sorted(vocabulary().items(), key=lambda entry: entry[1])
    spoken = [index for text, index in entries if _printable(text) and not text.startswith("<")]
    order = streams.generator("vocabulary").permutation(len(spoken))
    usable = len(spoken) // CLUSTER * CLUSTER
    cycles = torch.tensor([spoken[position] for position in order[:usable]]).view(-1, CLUSTER)

    count = len(entries)
    cluster = torch.full((count,), -1, dtype=torch.int64)
    successor = torch.zeros(count, dtype=torch.int64)
    cluster[cycles] = torch.arange(len(cycles))[:, None].expand_as(cycles)
    successor[cycles] = cycles.roll(-1, dims=1)
    outside = (cluster < 0).nonzero().flatten()
    entry = outside % cycles.numel()
    successor[outside] = cycles.flatten()[entry]
    cluster[outside] = entry // CLUSTER

    loudness = torch.full((count,), QUIET)
    loudness[cycles] = 1.0
    for text, index in entries:
        if text in _EAGER:
            loudness[index] = _EAGER[text]
    return Successors(successor, cluster, loudness, len(cycles))
