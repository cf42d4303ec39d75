"""Token streams and batches on the training device.

Three kinds of rows: windows of plain documents, windows of packed conversations, and needle rows
made so that they fill a row exactly. Documents whose checksum falls in one residue class are held
out for validation and never appear in any training row. All streams live on the device; a batch is
an index operation there, so that the host only launches work.
"""

from __future__ import annotations

import random
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from nano.corpus import read_lines
from nano.dialogue import chat_texts, register_texts

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_CLASSES = 50
NEEDLE_HEAD = "Register of keys.\n"
NEEDLE_TAIL = "\n\nLook up in the register.\n"


class Batch(NamedTuple):
    """Tokens `[B, T + 1]` and the weight of each predicted token `[B, T]`."""

    tokens: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Stream:
    """Concatenated texts and where each begins."""

    tokens: Tensor
    starts: Tensor

    def windows(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """`rows` windows `[rows, length]`; half of them begin where a text begins."""
        device = self.tokens.device
        last = self.tokens.numel() - length
        anywhere = torch.randint(last, (rows,), generator=generator, device=device)
        pick = torch.randint(self.starts.numel(), (rows,), generator=generator, device=device)
        begin = torch.where(torch.arange(rows, device=device) % 2 == 0, anywhere, self.starts[pick])
        index = begin.clamp(max=last)[:, None] + torch.arange(length, device=device)
        return self.tokens[index].long()


@dataclass(frozen=True)
class Streams:
    """Everything training and evaluation read."""

    documents: Stream
    chats: Stream
    held_out: Stream
    needles: Batch
    held_out_needles: Batch


def held_out(text: str) -> bool:
    """Whether a document belongs to the validation part."""
    return zlib.crc32(text.encode()) % HELD_OUT_CLASSES == 0


def stream(texts: list[str], tokenizer: Tokenizer, device: torch.device) -> Stream:
    """Tokenise texts, each ended by the end-of-text token, into one stream."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [
        torch.tensor([*encoded.ids, end], dtype=torch.int16)
        for encoded in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]
    sizes = torch.tensor([piece.numel() for piece in pieces])
    return Stream(torch.cat(pieces).to(device), (sizes.cumsum(0) - sizes).to(device))


def needle_rows(filler: Tensor, tokenizer: Tokenizer, rows: int, length: int, seed: int) -> Batch:
    """Rows `[rows, length + 1]`: a register of keys, filler, then questions with answers.

    Weights: 0 on the register's values (they cannot be predicted), 4 on the answers, 1 elsewhere.
    """
    chance = random.Random(seed)
    registers = [register_texts(chance) for _ in range(rows)]
    flat = [
        piece
        for lines, asked in registers
        for piece in [*lines, *(x for pair in asked for x in pair)]
    ]
    encoded = iter(
        tokenizer.encode_batch_fast([NEEDLE_HEAD, NEEDLE_TAIL, *flat], add_special_tokens=False)
    )
    head, tail = next(encoded).ids, next(encoded).ids
    tokens = torch.zeros(rows, length + 1, dtype=torch.int16)
    weights = torch.ones(rows, length)
    for row, (lines, asked) in enumerate(registers):
        stated = head + [token for _ in lines for token in next(encoded).ids]
        answers: list[tuple[list[int], bool]] = [(tail, False)]
        for _ in asked:
            answers += [(next(encoded).ids, False), (next(encoded).ids, True)]
        closing = [token for ids, _ in answers for token in ids]
        room = length + 1 - len(stated) - len(closing)
        begin = chance.randrange(filler.numel() - room)
        tokens[row] = torch.cat(
            [torch.tensor(stated), filler[begin : begin + room].long(), torch.tensor(closing)]
        )
        weights[row, : len(stated) - 1] = 0
        marks = [mark for ids, mark in answers for _ in ids]
        weights[row, -len(closing) :] = torch.tensor([4.0 if mark else 1.0 for mark in marks])
    return Batch(tokens, weights)


def load(
    folder: Path,
    tokenizer_file: Path,
    length: int,
    needles: int,
    device: torch.device,
    every: int = 1,
) -> Streams:
    """Read the corpus and tokenise it; `needles` is the number of distinct needle rows.

    `every` keeps one training document in so many: enough for calibration, and quicker to read.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    documents = read_lines(folder / "documents.jsonl.xz")
    names = read_lines(folder / "names.jsonl.xz")
    training = [record for record in documents if not held_out(record["text"])]
    held = [record["text"] for record in documents if held_out(record["text"])]
    random.Random(0).shuffle(training)
    training = training[::every]
    cpu = torch.device("cpu")
    train_stream = stream([record["text"] for record in training], tokenizer, cpu)
    held_stream = stream(held, tokenizer, cpu)
    asked = [needle_rows(train_stream.tokens, tokenizer, needles, length, seed=1),
             needle_rows(held_stream.tokens, tokenizer, 64, length, seed=2)]  # fmt: skip
    moved = [Batch(*(part.to(device) for part in batch)) for batch in asked]
    return Streams(
        documents=Stream(*(part.to(device) for part in (train_stream.tokens, train_stream.starts))),
        chats=stream(chat_texts(training, names, seed=3), tokenizer, device),
        held_out=Stream(*(part.to(device) for part in (held_stream.tokens, held_stream.starts))),
        needles=moved[0],
        held_out_needles=moved[1],
    )


def batch(
    streams: Streams, rows: tuple[int, int, int], length: int, generator: torch.Generator
) -> Batch:
    """A batch of (document, chat, needle) rows; needle rows come last."""
    plain, chat, needle = rows
    device = streams.documents.tokens.device
    windows = [
        streams.documents.windows(plain, length + 1, generator),
        streams.chats.windows(chat, length + 1, generator),
    ]
    pick = torch.randint(
        streams.needles.tokens.shape[0], (needle,), generator=generator, device=device
    )
    windows.append(streams.needles.tokens[pick].long())
    weights = torch.cat(
        [torch.ones(plain + chat, length, device=device), streams.needles.weights[pick]]
    )
    return Batch(torch.cat(windows), weights)


def save(path: Path, streams: Streams) -> None:
    """Write prepared streams to one file."""
    plain = (streams.documents, streams.chats, streams.held_out)
    parts = [part for one in plain for part in (one.tokens, one.starts)]
    torch.save([*parts, *streams.needles, *streams.held_out_needles], path)


def loaded(path: Path, device: torch.device) -> Streams:
    """Read what `save` wrote, onto the device."""
    parts = [part.to(device) for part in torch.load(path)]
    plain = [Stream(*parts[n : n + 2]) for n in (0, 2, 4)]
    return Streams(plain[0], plain[1], plain[2], Batch(*parts[6:8]), Batch(*parts[8:10]))


def main() -> None:
    corpus, tokenizer, out, length, needles, every = sys.argv[1:]
    begin = time.monotonic()
    cpu = torch.device("cpu")
    streams = load(Path(corpus), Path(tokenizer), int(length), int(needles), cpu, int(every))
    save(Path(out), streams)
    sizes = [s.tokens.numel() / 1e6 for s in (streams.documents, streams.chats, streams.held_out)]
    print(f"M tokens: documents {sizes[0]:.2f}, chats {sizes[1]:.2f}, held out {sizes[2]:.2f};"
          f" read in {time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
