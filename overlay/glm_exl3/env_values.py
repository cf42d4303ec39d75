"""Parsers of the settings' texts (`envs`): each returns the value or raises ValueError."""

from __future__ import annotations

import re

from glm_exl3.format import recode


def text(value: str) -> str:
    return value.strip()


def seconds(value: str) -> float:
    found = float(value)
    if found <= 0:
        raise ValueError("must be greater than 0")
    return found


def flag(value: str) -> bool:
    if value.strip() not in {"0", "1"}:
        raise ValueError("must be 0 or 1")
    return value.strip() == "1"


def strength(value: str) -> float:
    found = float(value)
    if not -16 <= found <= 16:
        raise ValueError("must be -16 to 16")
    return found


def layers(value: str) -> str:
    from glm_exl3.format.donor import parse_layers, show_layers

    return show_layers(parse_layers(value))


def count(value: str) -> int:
    if not 0 <= int(value) <= 64:
        raise ValueError("must be 0 to 64")
    return int(value)


def curve(value: str) -> tuple[tuple[int, float], ...]:
    points = sorted((int(n), float(ms)) for n, _, ms in (p.partition(":") for p in names(value)))
    if len({n for n, _ in points}) < 2 or points[0][0] < 1 or min(ms for _, ms in points) <= 0:
        raise ValueError("needs TOKENS:MS of two or more numbers of tokens, all greater than 0")
    return tuple(points)


def names(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


def patterns(value: str) -> tuple[str, ...]:
    for pattern in names(value):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return names(value)


def some_of(known: tuple[str, ...], value: str) -> tuple[str, ...]:
    found = () if value.strip() == "none" else names(value)
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(f"{', '.join(unknown)}: known are none, {', '.join(known)}")
    return found


def groups(value: str) -> str:
    return ",".join(recode.parse_groups(value))


def bits(value: str) -> int:
    found = int(value)
    if found not in recode.BITS:
        raise ValueError(f"must be {recode.BITS[0]} to {recode.BITS[-1]}")
    return found
