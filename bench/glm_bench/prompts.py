"""The prompts of the decode protocol, written for this project.

Three kinds, because drafting accepts very different shares of each: `structured` (tables, JSON),
`code`, `prose`. A run takes them in order, so the same `runs` means the same prompts.
"""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal["structured", "code", "prose"]
KINDS: tuple[Kind, ...] = get_args(Kind)

PROMPTS: dict[Kind, tuple[str, ...]] = {
    "structured": (
        "Write a JSON array of 20 objects describing fictional weather stations. Each object has "
        "the keys id, name, latitude, longitude, altitude_m and sensors (a list of strings).",
        "Make a Markdown table of the months of the year with the columns month, days, season on "
        "the northern hemisphere, and one crop harvested then.",
        "Write a YAML file that describes a small office network: two switches, one router, six "
        "computers, with names, addresses, ports and the cable that joins each pair.",
        "List the numbers from 1 to 60, one a line, each with its square and its cube, separated "
        "by semicolons.",
        "Write an XML document with ten recipes. Every recipe has a title, a list of ingredients "
        "with amounts, and numbered steps.",
    ),
    "code": (
        "Write a Python module with a bounded least-recently-used cache: a class with get, put and "
        "a hit counter, type annotations, and unit tests.",
        "Write a C function that merges two sorted linked lists in place, and a main function that "
        "shows it at work on several inputs.",
        "Write a Bash script that archives all files of a folder older than a given number of "
        "days, with a dry-run option, a usage text and checked arguments.",
        "Write a TypeScript function that groups an array of records by a key, keeps the order of "
        "first appearance, and is generic in the record type. Add examples.",
        "Write SQL that creates tables for a lending library, and the query that lists every "
        "overdue loan with the borrower and the days it is late.",
    ),
    "prose": (
        "Explain to a curious teenager why the sky is blue at noon and red in the evening.",
        "Describe a morning market in a harbour town: the sounds, the goods and the people.",
        "A colleague wants to rewrite a working program in another language. Write a letter that "
        "weighs the reasons for and against.",
        "Tell the story of a lighthouse keeper who finds that the lamp answers in a rhythm.",
        "Compare walking, cycling and taking the train for a trip of five kilometres to work.",
    ),
}


def prompts_for(kind: Kind, runs: int) -> list[str]:
    """The prompts of `runs` runs; they repeat after five."""
    available = PROMPTS[kind]
    return [available[index % len(available)] for index in range(runs)]
