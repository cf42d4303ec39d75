"""What the verbs share: settings, state, cluster and output of one command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from glm_launch import drafting, edits, preflight, settings_load, signals
from glm_launch import facts as facts_module
from glm_launch import plan as plan_module
from glm_launch.errors import ConfigurationError, RefusedError, raise_if_any
from glm_launch.facts import Facts
from glm_launch.lifecycle import Cluster, timings_key
from glm_launch.nodes.preflight import HELD, Report
from glm_launch.nodes.steps import Step
from glm_launch.plan import LaunchPlan
from glm_launch.runner import LocalRunner
from glm_launch.runners import PlannedRunner
from glm_launch.settings import Settings
from glm_launch.state import Current, StateStore
from glm_launch.ui import PhaseLines, Ui

FREED_S = 20.0


class Guard(Protocol):
    """Something that looks while a launch waits."""

    def check(self) -> None:
        """Raise when the launch must be given up."""


class Backend(Protocol):
    """How a launch is checked, planned and prepared on one kind of runtime."""

    def require(self) -> None:
        """Raise `ConfigurationError` for settings without which there is no launch."""

    def check(self, *, held: bool = False, again: bool = False) -> Report:
        """Everything that speaks against a launch; with `held` one of ours runs already.

        With `again`, facts that were gathered before are gathered anew.
        """

    def plan(self) -> LaunchPlan:
        """What would run; changes nothing."""

    def prepare(self) -> LaunchPlan:
        """Bring what is missing, and the plan that holds afterwards."""

    def changing(self, verb: str, *, steal: bool = False) -> AbstractContextManager[None]:
        """The right to change what runs on every node."""

    def guarding(self) -> AbstractContextManager[Guard]:
        """A watch over the machines while they load."""

    def answered(self) -> None:
        """The launch answered: remember what it was made of."""

    def steps(self, plan: LaunchPlan) -> list[Step]:
        """Every command that a launch would run."""


@dataclass
class LocalBackend:
    """Ranks as processes of this machine."""

    settings: Settings
    _facts: Facts | None = None

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            self._facts = facts_module.gather(self.settings)
        return self._facts

    def require(self) -> None:
        raise_if_any(ConfigurationError, plan_module.missing(self.settings))
        folders = Path(self.settings.MODEL), Path(self.settings.DFLASH_MODEL)
        drafting.require(self.settings, *folders)

    def plan(self) -> LaunchPlan:
        plan = plan_module.build(self.settings, self.facts)
        return edits.edited(plan, edits.settle(self.settings))

    def check(self, *, held: bool = False, again: bool = False) -> Report:
        self._facts = None if again else self._facts
        found = preflight.check(self.settings, self.facts, self.plan())
        return Report(tuple(one for one in found if not (held and one.code in HELD)))

    def prepare(self) -> LaunchPlan:
        return self.plan()

    def changing(self, verb: str, *, steal: bool = False) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def guarding(self) -> AbstractContextManager[Guard]:
        return nullcontext(NoGuard())

    def answered(self) -> None:
        return

    def steps(self, plan: LaunchPlan) -> list[Step]:
        ranks = [plan.ranks[number] for number in plan.start_order]
        return [
            Step(rank.node, f"{rank.name}, {rank.role}", (
                "env", *(f"{name}={value}" for name, value in rank.env),
                *(f"{name}=(secret)" for name in rank.secret_env), *rank.argv,
            ))
            for rank in ranks
        ]  # fmt: skip


class NoGuard:
    """Looks at nothing."""

    def check(self) -> None:
        return


@dataclass(frozen=True)
class Session:
    """One command's view of the world, made by `open_session`."""

    settings: Settings
    ui: Ui
    store: StateStore
    cluster: Cluster

    @cached_property
    def backend(self) -> Backend:
        if self.settings.runtime == "local":
            return LocalBackend(self.settings)
        from glm_launch.nodes.deploy import Deployment

        return Deployment(self.settings, self.store, self.ui)

    @contextmanager
    def lock(self, verb: str) -> Iterator[None]:
        """Hold the right to change something from this machine; signals become exceptions."""
        with signals.as_exceptions(), self.store.lock(verb):
            yield

    def plan(self) -> LaunchPlan:
        """The plan, with its warnings said."""
        plan = self.backend.plan()
        self.say_warnings(plan)
        return plan

    def say_warnings(self, plan: LaunchPlan) -> None:
        for warning in plan.warnings:
            self.ui.warn(warning)

    def check(self, *, held: bool = False, again: bool = False) -> None:
        """Raise `RefusedError` with everything that speaks against a launch."""
        report = self.backend.check(held=held, again=again)
        for warning in report.warnings:
            self.ui.warn(f"{warning.seen}; {warning.fix}")
        raise_if_any(RefusedError, report.findings)

    def check_freed(self) -> None:
        """Check once more after a stop, with some patience for what a launch of ours held."""
        deadline = time.monotonic() + FREED_S
        while True:
            report = self.backend.check(again=True)
            only_held = all(finding.code in HELD for finding in report.findings)
            if not report.findings or not only_held or time.monotonic() > deadline:
                break
            time.sleep(1.0)
        raise_if_any(RefusedError, report.findings)

    def prepare(self) -> LaunchPlan:
        plan = self.backend.prepare()
        self.say_warnings(plan)
        return plan

    def launch(self, plan: LaunchPlan, *, owned: bool = False) -> Current:
        """Launch and report progress; the lock must be held."""
        lines = PhaseLines(self.ui, self.store.timings(timings_key(plan)))
        self.ui.line(
            f"starting {plan.served_name} on {len(plan.ranks)} rank(s), drafting {plan.drafting}"
        )
        try:
            with self.backend.guarding() as guard:
                current = self._launch(plan, lines, owned, guard.check)
        finally:
            self.ui.stop_clock()
        self.backend.answered()
        lines.ready(self.store.timings(timings_key(plan))["READY"])
        return current

    def _launch(
        self, plan: LaunchPlan, lines: PhaseLines, owned: bool, guard: Callable[[], None]
    ) -> Current:
        secrets = self.settings.secrets()
        return self.cluster.launch(plan, secrets, lines, owned=owned, guard=guard)


def open_session(
    ui: Ui,
    overrides: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Session:
    """Load the settings and open the state folder; raises `ConfigurationError`."""
    loaded = settings_load.load(overrides=overrides, defaults=defaults)
    for warning in loaded.warnings:
        ui.warn(warning)
    store = StateStore(loaded.settings.GLM_STATE_DIR)
    runner = PlannedRunner(store.launches, LocalRunner(store.launches), store.folder / "keys")
    cluster = Cluster(store, runner, ui.line, loaded.settings.MIN_ACCEPTANCE)
    return Session(loaded.settings, ui, store, cluster)
