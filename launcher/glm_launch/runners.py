"""The `Runner` for any plan: each rank runs as its plan says, a process here or a container.

Everything needed to reach a rank is part of its `RankPlan`, so `status`, `logs` and `stop` work on
a launch whose settings have changed since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glm_launch.nodes.runner import ContainerRunner
from glm_launch.nodes.ssh import LocalShell, SshShell
from glm_launch.plan import RankPlan
from glm_launch.runner import NodeState, Runner


@dataclass
class PlannedRunner:
    """Implements `Runner`; `folder` holds logs by launch, `keys` the key of a head's container."""

    folder: Path
    local: Runner
    keys: Path
    log_every_s: float = 0.0
    _known: dict[tuple[str, str], ContainerRunner] = field(default_factory=dict)

    def start(
        self,
        rank: RankPlan,
        generation: str,
        secrets: Mapping[str, str],
        *,
        grace_s: float,
        owned: bool = False,
    ) -> None:
        self._of(rank).start(rank, generation, secrets, grace_s=grace_s, owned=owned)

    def observe(self, rank: RankPlan, generation: str) -> NodeState:
        return self._of(rank).observe(rank, generation)

    def stop(self, rank: RankPlan, generation: str, grace_s: float) -> None:
        self._of(rank).stop(rank, generation, grace_s)

    def log(self, rank: RankPlan, generation: str) -> Path:
        return self._of(rank).log(rank, generation)

    def _of(self, rank: RankPlan) -> Runner:
        if rank.box is None:
            return self.local
        key = (rank.node, rank.ssh)
        if key not in self._known:
            shell = SshShell(rank.node, rank.ssh) if rank.ssh else LocalShell(rank.node)
            self._known[key] = ContainerRunner(
                self.folder, {rank.node: shell}, {}, str(self.keys), self.log_every_s
            )
        return self._known[key]
