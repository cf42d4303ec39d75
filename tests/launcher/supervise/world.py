"""A cluster that exists only in numbers: faults go in, signs come out, actions change it.

It knows the truth that the supervisor has to find out, and checks the invariants at every tick.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from glm_launch.supervise import core
from glm_launch.supervise.core import End, StartAll, StopAll, Tell
from glm_launch.supervise.signs import EngineSign, LinkSign, Outcome, RankSign, Signs
from glm_launch.supervise.troubles import Rules

TICK_S = 0.5
CANARY_EVERY_S, CANARY_LIMIT_S = 60.0, 30.0


@dataclass
class Node:
    powered: bool = True
    plugged: bool = True
    ssh: bool = True
    rank: str = ""  # generation of the rank that runs here


@dataclass
class World:
    """`nodes[0]` is the head; `boot_s` is how long a start takes."""

    count: int = 2
    boot_s: float = 20.0
    rules: Rules = Rules()
    now: float = 1000.0
    running: float = 0.0
    stalled: bool = False
    silent: bool = False
    compiling: bool = False
    locked: bool = False
    broken_start: bool = False
    steps: float = 0.0
    generation: str | None = "g0"
    began: int = 0
    nodes: list[Node] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    stops: list[tuple[float, str]] = field(default_factory=list)
    told: list[tuple[float, str]] = field(default_factory=list)
    ended: End | None = None
    _outcome: Outcome | None = None
    _canary_at: float = 1000.0
    _failures: int = 0

    def __post_init__(self) -> None:
        self.nodes = [Node(rank="g0") for _ in range(self.count)]
        self.mind = core.adopt("g0", self.now)

    @property
    def whole(self) -> bool:
        """Whether the engine can make a step."""
        ranks = {node.rank for node in self.nodes}
        return (
            len(ranks) == 1 and "" not in ranks and not self.stalled
            and all(node.powered and node.plugged for node in self.nodes)
        )  # fmt: skip

    @property
    def healthy(self) -> bool:
        """Whether nothing at all is wrong with the running launch."""
        return self.whole and not self.silent and self.nodes[0].rank == self.generation

    def power(self, number: int, on: bool) -> None:
        node = self.nodes[number]
        node.powered = on
        node.rank = node.rank if on else ""

    def kill(self, number: int) -> None:
        self.nodes[number].rank = ""

    def command_stops(self) -> None:
        """A `stop` that somebody ran without ending the supervisor."""
        self.generation = None
        for node in self.nodes:
            node.rank = ""

    def signs(self) -> Signs:
        answers = [node.powered and node.ssh for node in self.nodes]
        ranks = tuple(
            RankSign(number, f"n{number}", bool(node.rank) if answers[number] else None, "gone")
            for number, node in enumerate(self.nodes)
        )
        links = tuple(
            LinkSign(
                f"n{number}",
                node.plugged if answers[number] else None,
                (node.plugged and node.powered and self.nodes[0].plugged) if number else None,
                "nic",
            )
            for number, node in enumerate(self.nodes)
        )
        up = self.nodes[0].rank and not self.silent
        return Signs(
            at=self.now, generation=self.generation, ranks=ranks, links=links, busy=self.locked,
            engine=EngineSign(self.running, self.steps) if up else None,
            compiling=self.compiling, canary_failures=self._failures, outcome=self._take(),
        )  # fmt: skip

    def _take(self) -> Outcome | None:
        taken, self._outcome = self._outcome, None
        return taken

    def advance(self) -> None:
        """One tick of the engine and of the canary, then one step of the supervisor."""
        self.now += TICK_S
        if self.whole and self.running:
            self.steps += 1
        if not self.running and self.now - self._canary_at >= CANARY_EVERY_S:
            if self.whole:
                self.steps, self._failures, self._canary_at = self.steps + 1, 0, self.now
            elif self.now - self._canary_at >= CANARY_EVERY_S + CANARY_LIMIT_S:
                self._failures += 1
                self._canary_at = self.now - CANARY_EVERY_S
        self.mind, actions = core.step(self.mind, self.signs(), self.rules)
        for action in actions:
            self._do(action)

    def _do(self, action: core.Action) -> None:
        if isinstance(action, Tell):
            self.told.append((self.now, action.code))
        elif isinstance(action, StopAll):
            self._stop(action)
        elif isinstance(action, StartAll):
            self._start()
        else:
            assert self.ended is None
            self.ended = action

    def _stop(self, action: StopAll) -> None:
        assert not self.locked, "acted while another command was at work"
        assert not self.healthy, f"stopped a healthy launch: {action.trouble}"
        self.stops.append((self.now, action.trouble.code))
        found = self.generation
        clean = True
        for node in self.nodes:
            if node.powered and node.ssh:
                node.rank = ""
            else:
                clean = False
        if clean:
            self.generation = None
        self.now += 1.0
        self._outcome = Outcome("stop", clean, clean, found, "" if clean else "a node is away")

    def _start(self) -> None:
        assert not self.locked, "acted while another command was at work"
        assert self.generation is None, "started over an old launch"
        assert all(not node.rank for node in self.nodes), "started over an old rank"
        assert all(node.powered and node.plugged and node.ssh for node in self.nodes)
        self.starts.append(self.now)
        window = [at for at in self.starts if self.now - at < self.rules.window_s]
        assert len(window) <= self.rules.max_restarts, "too many restarts"
        self.now += self.boot_s
        if self.broken_start:
            self._outcome = Outcome("start", False, True, None, "planted")
            return
        self.began += 1
        self.generation = f"g{self.began}"
        for node in self.nodes:
            node.rank = self.generation
        self.stalled = self.silent = False
        self.steps, self._failures, self._canary_at = 0.0, 0, self.now
        self._outcome = Outcome("start", True, True, self.generation)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end and self.ended is None:
            self.advance()

    def recover(self) -> bool:
        """Whether it is healthy or gave up within forty minutes."""
        end = self.now + 2400
        while self.now < end and self.ended is None and not self.settled:
            self.advance()
        return self.settled or self.ended is not None

    @property
    def settled(self) -> bool:
        return self.healthy and self.mind.phase == "watching"

    def first(self, code: str) -> float:
        """When `code` was said for the first time."""
        return next(at for at, said in self.told if said == code)
