"""The rules that turn signs into trouble: a rank ended, the engine stalls, a link is lost.

Pure. Each rule keeps its own times in `Memory`, so no rule hides another. What must stay true:
time in which nobody looked is not counted; a counter that moves disproves a stall, a failed canary
and a lost ping; a compiler at work, or a moment ago, postpones a stall, but not for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from glm_launch.supervise.signs import EngineSign, LinkSign, Signs


@dataclass(frozen=True)
class Rules:
    """All limits, in seconds where they are times.

    stall_s: how long a step may take while requests run. compile_ceiling_s: how long a compiler
    may postpone that. link_limit_s: how long a link may be away before the ranks are given up.
    blind_s: a longer gap between two looks does not count. settle_s: how long nodes and links must
    be back before a restart.
    """

    stall_s: float = 60.0
    compile_ceiling_s: float = 1800.0
    canary_failures: int = 2
    link_limit_s: float = 10.0
    blind_s: float = 5.0
    settle_s: float = 2.0
    delays_s: tuple[float, ...] = (2.0, 10.0, 30.0)
    max_restarts: int = 3
    window_s: float = 1800.0


@dataclass(frozen=True)
class Trouble:
    """Why a launch is stopped: `code` is stable, `text` is for a person."""

    code: Literal[
        "rank-ended", "stalled", "silent", "canary", "link-lost", "start-failed", "abandoned"
    ]
    text: str


@dataclass(frozen=True)
class Note:
    """Something to say that is no reason to stop."""

    level: Literal["info", "warning"]
    code: str
    text: str


@dataclass(frozen=True)
class Memory:
    """Since when things are as they are; None: they are fine or were never seen.

    compiled_at: when a compiler was last seen at work.
    """

    engine: EngineSign | None = None
    frozen_since: float | None = None
    silent_since: float | None = None
    canary_since: float | None = None
    compiled_at: float | None = None
    down: tuple[tuple[str, float], ...] = ()
    unreached: frozenset[str] = frozenset()
    postponed: frozenset[str] = frozenset()

    def shifted(self, by: float) -> Memory:
        """The same, as if `by` seconds had not passed."""

        def later(since: float | None) -> float | None:
            return None if since is None else since + by

        return replace(
            self,
            frozen_since=later(self.frozen_since),
            silent_since=later(self.silent_since),
            canary_since=later(self.canary_since),
            compiled_at=later(self.compiled_at),
            down=tuple((node, since + by) for node, since in self.down),
        )


def judge(
    memory: Memory, signs: Signs, gap_s: float, rules: Rules
) -> tuple[Memory, Trouble | None, list[Note]]:
    """What to remember, the first trouble there is, and what to say besides."""
    if gap_s > rules.blind_s:
        memory = memory.shifted(gap_s)
    moved = _moved(memory, signs)
    memory = _remember(memory, signs, moved)
    memory, notes = _links(memory, signs, moved)
    memory, more = _unreachable(memory, signs)
    found, postponed = _stalled(memory, signs, rules)
    new = [note for code, note in postponed.items() if code not in memory.postponed]
    memory = replace(memory, postponed=frozenset(postponed))
    trouble = _ended(signs) or _link_lost(memory, signs, rules) or found
    return memory, trouble, [*notes, *more, *new]


def missing(signs: Signs) -> tuple[str, ...]:
    """Nodes and links that a launch needs and that are not there, in words."""
    away = [f"{rank.node}, which does not answer" for rank in signs.ranks if rank.alive is None]
    away += [f"the link of {link.node} ({link.detail})" for link in signs.links if is_down(link)]
    return tuple(away)


def is_down(link: LinkSign) -> bool:
    return link.carrier is False or link.reachable is False


def _moved(memory: Memory, signs: Signs) -> bool:
    """Whether the engine made a step since the last look."""
    before, now = memory.engine, signs.engine
    return now is not None and (before is None or now.steps != before.steps)


def _remember(memory: Memory, signs: Signs, moved: bool) -> Memory:
    now = signs.engine
    if now is None:
        silent = memory.silent_since if memory.silent_since is not None else signs.at
        memory = replace(memory, silent_since=silent)
    else:
        still = now.running > 0 and not moved
        begin = memory.frozen_since if memory.frozen_since is not None else signs.at
        memory = replace(
            memory, engine=now, silent_since=None, frozen_since=begin if still else None
        )
    failed = signs.canary_failures > 0 and not moved
    since = memory.canary_since if memory.canary_since is not None else signs.at
    compiled_at = signs.at if signs.compiling else memory.compiled_at
    return replace(memory, canary_since=since if failed else None, compiled_at=compiled_at)


def _links(memory: Memory, signs: Signs, moved: bool) -> tuple[Memory, list[Note]]:
    before = dict(memory.down)
    now: dict[str, float] = {}
    notes = []
    for link in signs.links:
        node, since = link.node, before.get(link.node)
        unknown = link.carrier is None and link.reachable is None
        if link.carrier is False or (link.reachable is False and not moved):
            now[node] = signs.at if since is None else since
            if since is None:
                what = "has no carrier" if link.carrier is False else "does not answer a ping"
                notes.append(Note("warning", "link-down", f"{node}: {link.detail} {what}"))
        elif unknown and since is not None:
            now[node] = since
        elif since is not None:
            text = f"{node}: {link.detail} is back after {signs.at - since:.0f} s"
            notes.append(Note("warning", "link-back", text))
    return replace(memory, down=tuple(now.items())), notes


def _unreachable(memory: Memory, signs: Signs) -> tuple[Memory, list[Note]]:
    """A node that only ssh does not reach is no trouble: the ranks do not talk over ssh."""
    now = frozenset(rank.node for rank in signs.ranks if rank.alive is None)
    notes = [
        Note("warning", "no-ssh", f"{node} does not answer over ssh")
        for node in sorted(now - memory.unreached)
    ]
    notes += [
        Note("info", "ssh-back", f"{node} answers over ssh again")
        for node in sorted(memory.unreached - now)
    ]
    return replace(memory, unreached=now), notes


def _ended(signs: Signs) -> Trouble | None:
    ended = [rank for rank in signs.ranks if rank.alive is False]
    if not ended:
        return None
    return Trouble("rank-ended", "; ".join(rank.text or f"rank {rank.rank}" for rank in ended))


def _link_lost(memory: Memory, signs: Signs, rules: Rules) -> Trouble | None:
    lost = [(node, since) for node, since in memory.down if signs.at - since >= rules.link_limit_s]
    if not lost:
        return None
    details = {link.node: link.detail for link in signs.links}
    said = [f"{node} ({details[node]}) for {signs.at - since:.0f} s" for node, since in lost]
    return Trouble("link-lost", f"the link is away: {', '.join(said)}")


def _stalled(memory: Memory, signs: Signs, rules: Rules) -> tuple[Trouble | None, dict[str, Note]]:
    """Frozen counters, a silent API or failed canaries; a compiler postpones all three.

    It does so for `stall_s` longer than it is seen: what it made is loaded before the next step,
    and between two compilers of one pause there may be nothing to see.
    """
    seen = memory.compiled_at
    compiling = seen is not None and signs.at - seen < rules.stall_s
    running = signs.engine.running if signs.engine else 0
    failed = signs.canary_failures >= rules.canary_failures
    cases: Sequence[tuple[Literal["stalled", "silent", "canary"], float | None, float, str]] = (
        ("stalled", memory.frozen_since, rules.stall_s,
         f"{running:g} request(s) run and no step was made"),
        ("silent", memory.silent_since, rules.stall_s, "the API's counters do not answer"),
        ("canary", memory.canary_since if failed else None, 0.0,
         f"{signs.canary_failures} canaries in a row were not answered"),
    )  # fmt: skip
    postponed: dict[str, Note] = {}
    for code, since, limit, text in cases:
        if since is None or signs.at - since < limit:
            continue
        waited = signs.at - since
        if not compiling or waited >= rules.compile_ceiling_s:
            return Trouble(code, f"{text} for {waited:.0f} s"), postponed
        postponed[code] = Note(
            "info", f"postponed-{code}", f"{text}, but a compiler is or was at work"
        )
    return None, postponed
