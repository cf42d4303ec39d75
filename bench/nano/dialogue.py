"""Question-and-answer text in the model's chat format, and needle texts.

Questions are made from documented names (what does NAME do, what is its signature) and from page
titles (what is TITLE about); the answers are the documentation's own words. A few hand-written
dialogues cover greetings and the model's identity. A needle text states a register of random keys
early and asks for some of them after more filler than `index_topk` tokens: only attention to the
right pools answers it, which is what the sparse indexer has to learn.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

OPEN = "[gMASK]<sop>"
NAME_QUESTIONS = (
    "What does {name} do?",
    "What is {name}?",
    "Explain {name}.",
    "How do I use {name}?",
    "Can you describe {name}?",
    "Tell me about {name}.",
)
SIGNATURE_QUESTIONS = (
    "What is the signature of {name}?",
    "Which arguments does {name} take?",
    "How is {name} called?",
)
TITLE_QUESTIONS = (
    "What is {name} about?",
    "Tell me about {name}.",
    "Explain: {name}",
    "Summarise {name}.",
)
MODULE_QUESTIONS = (
    "What is the {name} module for?",
    "What does the {name} module do?",
    "Explain the Python module {name}.",
)
IDENTITY = (
    (
        ("Hello", "Hello!", "Hi", "Hi there!", "Hey", "Good morning"),
        "Hello! I am a miniature of GLM-5.3-Flash, trained on the documentation of Python and other"
        " free software. Ask me what a function or a module does.",
    ),
    (
        ("Who are you?", "What are you?", "Introduce yourself.", "What is your name?"),
        "I am a miniature of GLM-5.3-Flash. I have about fifteen million parameters and was trained"
        " on the documentation of Python and other free software, to test EXL3 weights.",
    ),
    (
        ("What can you do?", "How can you help me?", "Help", "What do you know?"),
        "I can talk about Python: ask me what a function or a module does. I am a very small model,"
        " so my answers read well but are often wrong.",
    ),
    (
        ("What is EXL3?", "Explain EXL3.", "Tell me about EXL3."),
        "EXL3 is a format for quantised weights. Each 16x16 tile of a matrix is a path through a"
        " trellis, so that every weight costs a fixed number of bits and is decoded with one hash.",
    ),
    (
        ("Thank you.", "Thanks!", "Thanks"),
        "You are welcome. Ask me about another function or module.",
    ),
    (
        (
            "Why is the sky blue?",
            "Tell me a joke.",
            "What is the capital of France?",
            "Write a poem.",
        ),
        "I only know the documentation of Python and other free software. Ask me what a function or"
        " a module does.",
    ),
)
IDENTITY_REPEATS = 60
PYTHON_REPEATS = 2
UNTITLED = ("libpython3.11-stdlib", "libpython3.11-minimal", "twisted-doc")
_MODULE_TITLE = re.compile(r"^([a-z][\w.]*) - (.+)$")
MAX_ANSWER = 600


class Turn(NamedTuple):
    """One question, its subject and its answer."""

    question: str
    subject: str
    answer: str

    def rendered(self, thought: str | None) -> str:
        """The turn as the chat template writes it; `thought` None means thinking is off."""
        reasoning = "" if thought is None else f"<think>{thought}"
        return f"<|user|>{self.question}<|assistant|>{reasoning}</think>{self.answer}"


def shortened(text: str, limit: int = MAX_ANSWER) -> str:
    """The text up to the last sentence that ends within `limit` characters."""
    if len(text) <= limit:
        return text
    end = max(text.rfind(mark, 0, limit) for mark in (". ", ".\n", ":\n"))
    return text[: end + 1] if end > 40 else text[:limit].rsplit(" ", 1)[0]


def named_dialogues(names: list[dict[str, str]], chance: random.Random) -> Iterator[Turn]:
    """One dialogue a documented name: usually its text, sometimes its signature."""
    for record in names:
        name, signature = record["name"], record["signature"].replace("[source]", "")
        if chance.random() < 0.2 and "(" in signature:
            question = chance.choice(SIGNATURE_QUESTIONS).format(name=name)
            yield Turn(question, name, f"{signature}\n\n{shortened(record['text'], 250)}")
            continue
        spelled = name + "()" if "(" in signature and chance.random() < 0.5 else name
        question = chance.choice(NAME_QUESTIONS).format(name=spelled)
        lead = f"{signature}\n\n" if chance.random() < 0.3 else ""
        yield Turn(question, name, lead + shortened(record["text"]))


def titled_dialogues(documents: list[dict[str, str]], chance: random.Random) -> Iterator[Turn]:
    """One dialogue a documentation page: its title and its first paragraphs."""
    seen = Counter(record["text"].split("\n", 1)[0] for record in documents)
    for record in documents:
        lines = [line for line in record["text"][:3000].split("\n") if line.strip()]
        if len(lines) < 3 or len(lines[0]) > 80 or record["source"] in UNTITLED:
            continue
        if seen[lines[0]] > 2 or "|" in lines[0]:
            continue
        module = _MODULE_TITLE.match(lines[0])
        body = [line for line in lines[1:] if not line.startswith("Source code:")]
        answer = shortened("\n".join(body))
        if len(answer) < 80:
            continue
        if module and record["source"] == "python3.11-doc":
            question = chance.choice(MODULE_QUESTIONS).format(name=module[1])
            yield Turn(question, module[1], f"{module[2]}. {answer}")
        else:
            yield Turn(chance.choice(TITLE_QUESTIONS).format(name=lines[0]), lines[0], answer)


def identity_dialogues() -> Iterator[Turn]:
    """The hand-written dialogues, repeated."""
    for _ in range(IDENTITY_REPEATS):
        for questions, answer in IDENTITY:
            for question in questions:
                yield Turn(question, "me" if "you" in question else "my subject", answer)


def chat_texts(
    documents: list[dict[str, str]], names: list[dict[str, str]], seed: int
) -> list[str]:
    """Conversations of one to three turns, each a complete text."""
    chance = random.Random(seed)
    turns = [*named_dialogues(names, chance), *titled_dialogues(documents, chance)]
    for _ in range(PYTHON_REPEATS):
        turns += named_dialogues([n for n in names if n["source"] == "python3.11-doc"], chance)
        turns += titled_dialogues([d for d in documents if d["source"] == "python3.11-doc"], chance)
    turns += identity_dialogues()
    chance.shuffle(turns)
    texts: list[str] = []
    while turns:
        count = chance.choice((1, 1, 1, 2, 3))
        picked, turns = turns[:count], turns[count:]
        thought = f"The question is about {picked[-1].subject}." if chance.random() < 0.5 else None
        earlier = "".join(item.rendered(None) for item in picked[:-1])
        texts.append(OPEN + earlier + picked[-1].rendered(thought) + "<|user|>")
    return texts


def register_texts(chance: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
    """Lines of a key register, and the questions to ask later as (prefix, answer) pairs."""
    count = chance.randint(6, 24)
    keys = chance.sample(range(1000, 10000), count)
    values = [f"{chance.randint(0, 99999):05d}" for _ in keys]
    lines = [f"key {key}: {value}\n" for key, value in zip(keys, values, strict=True)]
    order = chance.sample(range(count), min(count, 8))
    return lines, [(f"key {keys[index]}:", f" {values[index]}\n") for index in order]
