"""Notice garbled output: replacement characters, loops, noise, a foreign script.

A serving fault (a wrong kernel, a corrupt cache) shows as text long before anybody measures
quality. Each check looks for one symptom users reported and says what it saw; a clean answer gives
no finding. The limits are set between ordinary prose and code on one side and constructed faults
on the other (tests/bench/test_coherence.py holds both). This judges form, not sense.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

MIN_CHARACTERS = 80
LOOP_WORDS = 6
MAX_LOOP_SHARE = 0.5
MAX_RUN = 40
MIN_ENTROPY_BITS = 2.5
MAX_ENTROPY_BITS = 5.6
MAX_FOREIGN_SHARE = 0.05
MIN_MEMORABLE_WORDS = 24


@dataclass(frozen=True)
class Symptom:
    """What is wrong with a text, `kind` for programs and `seen` for people."""

    kind: str
    seen: str


def inspect(text: str, prompt: str = "") -> list[Symptom]:
    """All symptoms of `text`; `prompt` tells which scripts were to be expected."""
    found: list[Symptom | None] = [
        invalid_characters(text),
        long_run(text),
        loop(text),
        entropy(text),
        foreign_script(text, prompt),
    ]
    return [symptom for symptom in found if symptom]


def invalid_characters(text: str) -> Symptom | None:
    """Bytes that were no UTF-8, and control characters."""
    bad = Counter(filter(_is_invalid, text))
    if not bad:
        return None
    shown = ", ".join(f"U+{ord(character):04X} x{count}" for character, count in bad.most_common(3))
    return Symptom("invalid-characters", shown)


def _is_invalid(character: str) -> bool:
    if character == "\ufffd":
        return True
    return unicodedata.category(character) in ("Cc", "Co", "Cs") and character not in "\n\r\t"


def long_run(text: str) -> Symptom | None:
    """The same visible character many times in a row, such as `!!!!!`."""
    match = re.search(rf"([^\s\-=_*#.~|])\1{{{MAX_RUN - 1},}}", text)
    return Symptom("long-run", f"{match[1]!r} x{len(match[0])}") if match else None


def loop(text: str) -> Symptom | None:
    """A sequence of words that comes back until it makes up most of the text."""
    words = text.split()
    if len(words) < MIN_MEMORABLE_WORDS:
        return None
    grams = Counter(zip(*(words[i:] for i in range(LOOP_WORDS)), strict=False))
    repeated = sum(count for count in grams.values() if count > 1)
    share = repeated / sum(grams.values())
    if share <= MAX_LOOP_SHARE:
        return None
    worst = " ".join(grams.most_common(1)[0][0])
    return Symptom("loop", f"{share:.0%} of the text repeats, such as {worst!r}")


def entropy(text: str) -> Symptom | None:
    """Too little variety, or as much as noise."""
    if len(text) < MIN_CHARACTERS:
        return None
    bits = bits_per_character(text)
    if MIN_ENTROPY_BITS <= bits <= MAX_ENTROPY_BITS:
        return None
    return Symptom("entropy", f"{bits:.1f} bits per character")


def bits_per_character(text: str) -> float:
    """Shannon entropy of the characters, case folded."""
    counts = Counter(text.lower())
    total = sum(counts.values())
    return -sum(n / total * math.log2(n / total) for n in counts.values())


def foreign_script(text: str, prompt: str) -> Symptom | None:
    """Letters of a script that the prompt does not use."""
    letters = Counter(map(script, filter(str.isalpha, text)))
    total = sum(letters.values())
    if total < MIN_CHARACTERS // 2:
        return None
    expected = {"LATIN", "GREEK", *map(script, filter(str.isalpha, prompt))}
    foreign = sum(count for name, count in letters.items() if name not in expected)
    if foreign / total <= MAX_FOREIGN_SHARE:
        return None
    names = ", ".join(name for name, _ in letters.most_common() if name not in expected)
    return Symptom("foreign-script", f"{foreign / total:.0%} of the letters: {names}")


def script(character: str) -> str:
    """The script of a letter by its Unicode name, such as LATIN or CJK."""
    return unicodedata.name(character, "UNKNOWN").split()[0].split("-")[0]
