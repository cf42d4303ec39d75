"""What the supervisor sees at one moment, as values. `core` judges them, `eyes` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RankSign:
    """One rank: `alive` is None while its node does not answer; `text` says how it ended."""

    rank: int
    node: str
    alive: bool | None
    text: str = ""


@dataclass(frozen=True)
class EngineSign:
    """The head's counters: requests being computed, and steps with tokens since its start."""

    running: float
    steps: float


@dataclass(frozen=True)
class LinkSign:
    """The fabric device of one node; None where it is not known.

    carrier: the kernel sees a link. reachable: the other nodes answer a ping, None before the
    first one did. detail: device, peer and counters for a person.
    """

    node: str
    carrier: bool | None = None
    reachable: bool | None = None
    detail: str = ""


@dataclass(frozen=True)
class Outcome:
    """How an action ended. clean: nothing of the old launch is left anywhere."""

    action: Literal["stop", "start"]
    ok: bool
    clean: bool = True
    generation: str | None = None
    text: str = ""


@dataclass(frozen=True)
class Signs:
    """Everything seen at `at` seconds of a clock that never jumps.

    generation: the launch that should run. busy: another command is changing something.
    canary_failures: canaries in a row that failed while the engine made no step.
    """

    at: float
    generation: str | None
    ranks: tuple[RankSign, ...] = ()
    engine: EngineSign | None = None
    links: tuple[LinkSign, ...] = ()
    busy: bool = False
    compiling: bool = False
    canary_failures: int = 0
    outcome: Outcome | None = None
