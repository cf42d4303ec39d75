"""The baseline: an interpolated Kneser-Ney 5-gram model over the same tokens.

`python -m nano.ngram CORPUS TOKENIZER` trains on the training documents and prints the mean loss on
the held-out tokens that `nano.evaluate` uses. An n-gram is one int64 (11 bits a token), so counting
is sorting and looking up is a binary search.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from nano.corpus import read_lines
from nano.data import held_out, stream

ORDER = 5
TOKEN_BITS = 11
Keys = npt.NDArray[np.int64]


class Table(NamedTuple):
    """Counts of one order: sorted n-grams, and their contexts with totals and types."""

    grams: Keys
    counts: Keys
    contexts: Keys
    totals: Keys
    types: Keys
    discount: float


def keys(tokens: Keys, order: int) -> Keys:
    """Packed n-grams that end at each token from `order - 1` on."""
    length = tokens.size - order + 1
    packed = np.zeros(length, dtype=np.int64)
    for offset in range(order):
        packed = (packed << TOKEN_BITS) | tokens[offset : offset + length]
    return packed


def table(grams: Keys, counts: Keys) -> Table:
    """Totals per context and the discount n1 / (n1 + 2 n2) of sorted, distinct n-grams."""
    contexts, first = np.unique(grams >> TOKEN_BITS, return_index=True)
    totals = np.add.reduceat(counts, first)
    types = np.diff(np.append(first, grams.size))
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return Table(grams, counts, contexts, totals, types, once / max(1, once + 2 * twice))


def tables(tokens: Keys) -> list[Table]:
    """Tables of orders 1 to 5: raw counts for 5, numbers of distinct left neighbours below."""
    grams, counts = np.unique(keys(tokens, ORDER), return_counts=True)
    result = [table(grams, counts)]
    for order in range(ORDER - 1, 0, -1):
        shorter = grams & ((1 << (TOKEN_BITS * order)) - 1)
        grams, counts = np.unique(shorter, return_counts=True)
        result.insert(0, table(grams, counts))
    return result


def looked_up(sorted_keys: Keys, values: Keys, wanted: Keys) -> npt.NDArray[np.float64]:
    """The value of each wanted key, 0 where it is absent."""
    place = np.searchsorted(sorted_keys, wanted).clip(max=sorted_keys.size - 1)
    return np.where(sorted_keys[place] == wanted, values[place], 0).astype(np.float64)


def mean_loss(trained: list[Table], tokens: Keys, vocab_size: int) -> float:
    """Mean negative log probability (nats) of tokens 4, 5, ... given the four before each."""
    probability = np.full(tokens.size - ORDER + 1, 1.0 / vocab_size)
    for order, counted in enumerate(trained, start=1):
        wanted = keys(tokens, order)[ORDER - order :]
        context = wanted >> TOKEN_BITS
        count = looked_up(counted.grams, counted.counts, wanted)
        total = looked_up(counted.contexts, counted.totals, context)
        types = looked_up(counted.contexts, counted.types, context)
        seen = np.maximum(total, 1)
        mixed = np.maximum(count - counted.discount, 0) / seen
        mixed += counted.discount * types / seen * probability
        probability = np.where(total > 0, mixed, probability)
    return float(-np.log(probability).mean())


def main() -> None:
    corpus, tokenizer_file, tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    tokenizer = Tokenizer.from_file(tokenizer_file)
    texts = [record["text"] for record in read_lines(corpus / "documents.jsonl.xz")]
    cpu = torch.device("cpu")
    training = stream([text for text in texts if not held_out(text)], tokenizer, cpu).tokens
    held = stream([text for text in texts if held_out(text)], tokenizer, cpu).tokens
    trained = tables(training.numpy().astype(np.int64))
    loss = mean_loss(trained, held.numpy().astype(np.int64)[:tokens], tokenizer.get_vocab_size())
    print(f"{ORDER}-gram loss {loss:.4f} nats a token over {tokens} tokens")


if __name__ == "__main__":
    main()
