"""Start, stop and look at all ranks of a launch.

`Cluster` knows the order and the rollback and nothing about how a rank runs; that is the `Runner`.
What must stay true: workers start before the head; a launch that fails or is interrupted leaves
nothing running that it started; `stop` is idempotent and leaves no process, also for launches whose
launcher was killed; everything that could refuse a launch is checked before anything is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from glm_launch import acceptance, health, procs, signals
from glm_launch.errors import (
    Finding,
    LaunchError,
    LaunchFailedError,
    RefusedError,
    UnhealthyError,
)
from glm_launch.plan import LaunchPlan, RankPlan
from glm_launch.runner import NodeState, Runner
from glm_launch.state import Current, StateStore, new_generation

WORKER_GRACE_S = 2.0
NO_SECRETS: Mapping[str, str] = MappingProxyType({})
OnPhase = Callable[[str, float], None]
Say = Callable[[str], None]


@dataclass
class Cluster:
    """All ranks of the current launch."""

    store: StateStore
    runner: Runner
    say: Say = lambda _text: None
    min_acceptance: float = 0.0

    def start(
        self,
        plan: LaunchPlan,
        generation: str = "",
        secrets: Mapping[str, str] = NO_SECRETS,
        *,
        owned: bool = False,
    ) -> Current:
        """Start every rank in order and return at once; the lock must be held.

        `generation` names the launch; empty: a new name.
        """
        current = self.store.begin(plan, generation or new_generation(), owned=owned)
        for number in plan.start_order:
            rank = plan.ranks[number]
            self.runner.start(
                rank, current.generation, secrets, grace_s=grace_of(plan, rank), owned=owned
            )
        return current

    def stop(self) -> bool:
        """End every rank of the current launch, the head first; False when there was none.

        A node that does not answer does not keep the others running: all are stopped, then
        `LaunchFailedError` names it, and the launch stays recorded so that `stop` can be repeated.
        """
        current = self.store.current()
        if current is None:
            return False
        failed: list[Finding] = []
        with signals.shielded():
            current = self.store.mark(current, "stopping")
            for rank in current.plan.ranks:
                self.say(f"stopping rank {rank.rank} ({rank.role})")
                try:
                    self.runner.stop(rank, current.generation, grace_of(current.plan, rank))
                except LaunchError as error:
                    failed += [_not_stopped(rank, found) for found in error.findings]
            if failed:
                raise LaunchFailedError(*failed)
            self.store.forget()
        return True

    def observe(self) -> list[NodeState]:
        """The state of every rank; empty when nothing should run."""
        current = self.store.current()
        if current is None:
            return []
        return [self.runner.observe(rank, current.generation) for rank in current.plan.ranks]

    def launch(
        self,
        plan: LaunchPlan,
        secrets: Mapping[str, str],
        on_phase: OnPhase,
        *,
        owned: bool = False,
        guard: Callable[[], None] = lambda: None,
    ) -> Current:
        """Start all ranks and wait for a real answer; on any failure stop them again.

        `guard` is called all the while and raises when the launch must be given up. Raises
        `LaunchFailedError` or `InterruptedLaunchError` after the rollback.
        """
        with signals.as_exceptions():
            try:
                current = self.start(plan, secrets=secrets, owned=owned)
                times = health.wait_ready(self._waiting(plan, current, secrets, on_phase, guard))
                acceptance.require(plan, secrets, self.min_acceptance, self.say)
                self.store.keep_timings(timings_key(plan), times)
                return self.store.mark(current, "ready")
            except BaseException as error:
                self._roll_back(error)
                raise

    def _roll_back(self, error: BaseException) -> None:
        """Stop what was started; what cannot be stopped is told beside what went wrong."""
        try:
            self.stop()
        except LaunchFailedError as left:
            if isinstance(error, LaunchError):
                raise type(left)(*error.findings, *left.findings) from error
            raise

    def _waiting(
        self,
        plan: LaunchPlan,
        current: Current,
        secrets: Mapping[str, str],
        on_phase: OnPhase,
        guard: Callable[[], None],
    ) -> health.Waiting:
        logs = [self.runner.log(rank, current.generation) for rank in plan.ranks]
        key = secrets.get("VLLM_API_KEY")

        def observe() -> list[NodeState]:
            guard()
            return self.observe()

        return health.Waiting(
            plan=plan,
            observe=observe,
            watch=health.LogWatch(logs),
            on_phase=on_phase,
            canary=lambda: health.complete(
                plan.base_url, plan.served_name, key, health.CANARY_TIMEOUT_S
            ),
        )

    def clean_up(self) -> bool:
        """Stop what a killed launcher or demo left behind; the lock must be held.

        True when something was cleaned up.
        """
        current = self.store.current()
        if current is None or not is_stale(current, self.observe()):
            return False
        self.say(f"cleaning up launch {current.generation}, whose launcher is gone")
        return self.stop()

    def refuse_second(self) -> None:
        """Raise `RefusedError` when a launch is already current."""
        current = self.store.current()
        if current is not None:
            raise RefusedError(_runs_already(current))


def is_stale(current: Current, states: list[NodeState]) -> bool:
    """Whether a launch can be given up: nobody looks after it, or none of its ranks is left.

    A launch in the middle of starting or stopping is stale, since its command holds the lock that
    the caller has; a ready one is stale when its owner (the demo) is gone.
    """
    if current.phase != "ready":
        return True
    if current.owned and not procs.is_alive(current.launcher):
        return True
    return all(state.state not in ("running", "orphaned") for state in states)


def grace_of(plan: LaunchPlan, rank: RankPlan) -> float:
    """Seconds a rank may take to end: a worker has nothing to drain once the head is gone.

    vLLM's headless node would wait 9 s for a process that hangs in a collective.
    """
    grace = float(plan.stop_grace_s)
    return grace if rank.role == "head" else min(grace, WORKER_GRACE_S)


def timings_key(plan: LaunchPlan) -> str:
    """Launches with the same key take about the same time."""
    return f"{plan.model}|{plan.drafting}|{len(plan.ranks)}"


def raise_if_unhealthy(
    current: Current, states: list[NodeState], answer: Mapping[str, object]
) -> None:
    """Raise `UnhealthyError` with every rank that is not running and the probe that failed."""
    try:
        health.raise_if_ended(states)
    except LaunchError as error:
        raise UnhealthyError(*error.findings) from None
    if not answer["answered"]:
        raise UnhealthyError(
            Finding(
                "no-answer",
                f"{current.plan.base_url} does not answer: {answer['error']}",
                "ranks run but the model does not",
                "./start.sh restart; ./start.sh logs shows what the engine said",
            )
        )


def _not_stopped(rank: RankPlan, found: Finding) -> Finding:
    return Finding(
        found.code,
        f"rank {rank.rank} on {rank.node} could not be stopped: {found.seen}",
        "its container may still run and hold its memory",
        f"{found.fix}; then ./start.sh stop again",
    )


def _runs_already(current: Current) -> Finding:
    return Finding(
        "runs-already",
        f"launch {current.generation} of {current.plan.served_name} is {current.phase} at "
        f"{current.plan.base_url}",
        "a second one would compete for ports and memory",
        "./start.sh restart replaces it, ./start.sh stop ends it",
    )
