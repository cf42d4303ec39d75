"""Does a long text degenerate? Repeated n-grams, entropy, invalid UTF-8.

`python -m nano.longtext RUN STREAMS TOKENIZER OUT` judges the texts that `nano.finish` let every
model write. A text is looked at in windows of 256 tokens, every 128 tokens: the share of its
8-grams that stood in the 512 tokens before (loops), the entropy of its tokens in nats (poverty),
and characters that are no valid UTF-8 (garbage). The limits come from held-out text of people: the
value that one window in a hundred passes. A text is degenerate if more than a quarter of its
windows are, or if any of it is no valid UTF-8. A packed model fails when it has more degenerate
texts than BF16 and Fisher's exact test puts the odds of that, by chance, below 1 %.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

WINDOW, STRIDE, GRAM, BEHIND = 256, 128, 8, 512
RARE = 0.01
MOST_BAD = 0.25
TEMPERATURES = ("0.0", "0.7")
REPLACEMENT = "\ufffd"


class Limits(NamedTuple):
    """The most repetition and the least entropy (nats) of a sound window."""

    repeated: float
    entropy: float


class Verdict(NamedTuple):
    """Of one text: share of bad windows, and characters that are no UTF-8."""

    bad: float
    invalid: int

    @property
    def degenerate(self) -> bool:
        return self.bad > MOST_BAD or self.invalid > 0


def repeated_share(tokens: Sequence[int], start: int) -> float:
    """Share of the window's 8-grams that also begin within the 512 tokens before them."""
    begin = max(0, start - BEHIND)
    last: dict[tuple[int, ...], int] = {}
    hits = 0
    for place in range(begin, start + WINDOW - GRAM + 1):
        gram = tuple(tokens[place : place + GRAM])
        hits += place >= start and place - last.get(gram, -BEHIND - 1) <= BEHIND
        last[gram] = place
    return hits / (WINDOW - GRAM + 1)


def entropy(tokens: Sequence[int]) -> float:
    """Entropy of the tokens' own distribution, nats."""
    counts = Counter(tokens)
    return -sum(n / len(tokens) * math.log(n / len(tokens)) for n in counts.values())


def windows(tokens: Sequence[int]) -> list[tuple[float, float]]:
    """(repeated share, entropy) of each window of a text."""
    starts = range(0, len(tokens) - WINDOW + 1, STRIDE)
    return [(repeated_share(tokens, s), entropy(tokens[s : s + WINDOW])) for s in starts]


def limits(measured: Sequence[tuple[float, float]]) -> Limits:
    """What one window in a hundred of people's text passes."""
    repeated = sorted(share for share, _ in measured)
    poor = sorted(value for _, value in measured)
    rare = int(RARE * len(measured))
    return Limits(repeated[-1 - rare], poor[rare])


def verdict(tokens: Sequence[int], text: str, bounds: Limits) -> Verdict:
    """Judge a text; its last character may be cut off."""
    found = windows(tokens)
    bad = sum(share > bounds.repeated or value < bounds.entropy for share, value in found)
    return Verdict(bad / len(found), text.rstrip(REPLACEMENT).count(REPLACEMENT))


def more_by_chance(first: int, second: int, count: int) -> float:
    """Fisher's exact test, one-sided: P(at least `second` of both fall on the second model).

    `first` and `second` of `count` texts each are degenerate.
    """
    both = first + second
    ways = math.comb(2 * count, both)
    most = min(count, both)
    return (
        sum(math.comb(count, k) * math.comb(count, both - k) for k in range(second, most + 1))
        / ways
    )


def summary(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Counts and mean shares over the texts of one model at one temperature."""
    return {
        "texts": len(verdicts),
        "degenerate": sum(v.degenerate for v in verdicts),
        "bad_windows": round(sum(v.bad for v in verdicts) / len(verdicts), 4),
        "invalid_utf8": sum(v.invalid for v in verdicts),
    }


def judged(run: Path, held: Sequence[int], tokenizer: Tokenizer) -> dict[str, object]:
    """Figures of every model of a run, with the limits and each packed model's odds."""
    bounds = limits(windows(held))
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for file in sorted(run.glob("texts-*.safetensors")):
        name = file.stem.removeprefix("texts-")
        for temperature, rows in zip(TEMPERATURES, load_file(file)["tokens"], strict=True):
            texts = [[int(token) for token in row] for row in rows]
            read = [tokenizer.decode(text, skip_special_tokens=False) for text in texts]
            found = [verdict(t, r, bounds) for t, r in zip(texts, read, strict=True)]
            figures.setdefault(temperature, {})[name] = summary(found)
    for models in figures.values():
        own = models["bf16"]
        for name, figure in models.items():
            if name != "bf16":
                counts = int(own["degenerate"]), int(figure["degenerate"]), int(own["texts"])
                figure["odds"] = round(more_by_chance(*counts), 4)
    return {"limits": bounds._asdict(), "tokens": 2000, **figures}


def main() -> None:
    run, streams, tokenizer_file, out = map(Path, sys.argv[1:])
    held = [int(token) for token in torch.load(streams)[4][:400_000]]
    found = judged(run, held, Tokenizer.from_file(str(tokenizer_file)))
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
