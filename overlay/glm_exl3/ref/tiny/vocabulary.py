"""The successor structure of the vocabulary, which makes drafts predictable part of the time.

What: every token has a successor in a cycle of eight tokens. An embedding has a visible part, which
points at the head row of the token's successor, and a hidden part, which the final norm removes: a
flag for "a token" or "the mask token" and the code of the cycle. Greedy decoding walks the cycle
until the layers push it out; a drafter that only knows the cycles is right until then. Why
constructed: drafts are accepted part of the time, without training, alike on every machine.

What must stay true: tokens that would break text (control tokens, bytes beyond ASCII) are in no
cycle. Their successor lies in one, and their head rows are quiet, so they are hardly generated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm_exl3.ref.tiny.recipe import RandomStreams
from glm_exl3.ref.tiny.tokenizer import MASK_ENTRY, token_id, vocabulary

CYCLE = 8
TOKEN_FEATURE = 0
MASK_FEATURE = 1
CODE = slice(2, 64)
VISIBLE = slice(64, None)
QUIET = 0.1
CODE_RMS = 1.0
FLAG = 8.0
WEAK_LINK = 0.4
# Loud enough that thinking ends after some tens of tokens; an answer ends by chance or by length.
_LOUDNESS = {"</think>": 2.0, "<|endoftext|>": 1.0}


@dataclass(frozen=True)
class Cycles:
    """The cycles of one seed.

    `members` int64 `[C, 8]` in walking order; `successor` and `cycle` int64 `[V]` for every token,
    also those outside; `codes` fp64 `[C, 62]` of unit RMS; `loudness` fp32 `[V]` scales a token's
    head row, that is how likely it is to be generated at all.
    """

    members: Tensor
    successor: Tensor
    cycle: Tensor
    codes: Tensor
    loudness: Tensor


def _printable(text: str) -> bool:
    return all(" " < char <= "~" or char in "ĠĊ" for char in text)


def cycles(streams: RandomStreams) -> Cycles:
    """The cycles over the committed tokenizer's vocabulary."""
    entries = sorted(vocabulary().items(), key=lambda entry: entry[1])
    spoken = [index for text, index in entries if _printable(text) and not text.startswith("<")]
    order = streams.generator("vocabulary").permutation(len(spoken))
    usable = len(spoken) // CYCLE * CYCLE
    members = torch.tensor([spoken[position] for position in order[:usable]]).view(-1, CYCLE)

    count = len(entries)
    cycle = torch.full((count,), -1, dtype=torch.int64)
    successor = torch.zeros(count, dtype=torch.int64)
    cycle[members] = torch.arange(len(members))[:, None].expand_as(members)
    successor[members] = members.roll(-1, dims=1)
    outside = (cycle < 0).nonzero().flatten()
    entry = outside % members.numel()
    successor[outside] = members.flatten()[entry]
    cycle[outside] = entry // CYCLE

    loudness = torch.full((count,), QUIET)
    loudness[members] = 1.0
    for text, index in entries:
        loudness[index] = _LOUDNESS.get(text, loudness[index])
    codes = streams.normal("codes", len(members), CODE.stop - CODE.start).double()
    codes = codes / codes.square().mean(-1, keepdim=True).sqrt()
    return Cycles(members, successor, cycle, codes, loudness)


def directions(rows: Tensor) -> Tensor:
    """The visible part of head rows `[..., H]` at unit RMS, zero elsewhere."""
    seen = torch.zeros_like(rows)
    seen[..., VISIBLE] = rows[..., VISIBLE]
    return seen / seen[..., VISIBLE].square().mean(-1, keepdim=True).sqrt()


def embeddings(table: Cycles, head: Tensor, pull: float) -> Tensor:
    """Embeddings fp64 `[V, H]` for head rows `[V, H]`; `pull` is the RMS of the visible part.

    The last member of a cycle pulls less, so that no text walks one cycle for ever.
    """
    strength = torch.full((len(head), 1), pull, dtype=head.dtype)
    strength[table.members[:, -1]] *= WEAK_LINK
    rows = strength * directions(head[table.successor])
    rows[:, CODE] = CODE_RMS * table.codes[table.cycle]
    rows[:, TOKEN_FEATURE] = FLAG
    mask = token_id(MASK_ENTRY)
    rows[mask] = 0
    rows[mask, MASK_FEATURE] = FLAG
    return rows


def visible_norm(weight: Tensor) -> Tensor:
    """An RMSNorm weight `[H]` that removes the hidden part."""
    hidden = weight.clone()
    hidden[: VISIBLE.start] = 0
    return hidden
