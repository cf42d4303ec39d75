"""What the verbs share: settings, state, cluster and output of one command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from glm_launch import facts as facts_module
from glm_launch import plan as plan_module
from glm_launch import preflight, settings_load
from glm_launch.errors import RefusedError, raise_if_any
from glm_launch.facts import Facts
from glm_launch.lifecycle import Cluster, timings_key
from glm_launch.plan import LaunchPlan
from glm_launch.runner import LocalRunner
from glm_launch.settings import Settings
from glm_launch.state import Current, StateStore
from glm_launch.ui import PhaseLines, Ui


@dataclass(frozen=True)
class Session:
    """One command's view of the world, made by `open_session`."""

    settings: Settings
    ui: Ui
    store: StateStore
    cluster: Cluster

    @cached_property
    def facts(self) -> Facts:
        return facts_module.gather(self.settings)

    def plan(self) -> LaunchPlan:
        """The plan, with its warnings said."""
        plan = plan_module.build(self.settings, self.facts)
        for warning in plan.warnings:
            self.ui.warn(warning)
        return plan

    def check(self, plan: LaunchPlan) -> None:
        """Raise `RefusedError` with everything preflight found."""
        raise_if_any(RefusedError, preflight.check(self.settings, self.facts, plan))

    def launch(self, plan: LaunchPlan, *, owned: bool = False) -> Current:
        """Launch and report progress; the lock must be held."""
        lines = PhaseLines(self.ui, self.store.timings(timings_key(plan)))
        self.ui.line(
            f"starting {plan.served_name} on {len(plan.ranks)} rank(s), drafting {plan.drafting}"
        )
        try:
            current = self.cluster.launch(plan, self.settings.secrets(), lines, owned=owned)
        finally:
            self.ui.stop_clock()
        lines.ready(self.store.timings(timings_key(plan))["READY"])
        return current


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
    runner = LocalRunner(store.launches)
    return Session(loaded.settings, ui, store, Cluster(store, runner, ui.line))
