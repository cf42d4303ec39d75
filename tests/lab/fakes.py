"""A cluster of fake ranks (`fakerank.py`) on the nodes of a lab."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab import IMAGE, Lab, Node

from glm_launch.lifecycle import Cluster
from glm_launch.nodes.docker_cli import Box
from glm_launch.nodes.runner import ContainerRunner
from glm_launch.plan import LaunchPlan, RankPlan
from glm_launch.state import StateStore

FAKE = ("python3", "/opt/glm-exl3/fakerank.py", "serve", "/model")


@dataclass
class Fakes:
    """A cluster of fake ranks: `plan` describes it, `cluster` runs it."""

    lab: Lab
    folder: Path
    env: dict[int, dict[str, str]] = field(default_factory=dict)
    extra: dict[int, tuple[str, ...]] = field(default_factory=dict)
    key: str = ""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Fakes:
        """The same cluster in another process."""
        lab = Lab(Path(value["lab"]), Path(value["lab"]).name)
        lab.nodes = [Node(lab, number + 1, init=pid) for number, pid in enumerate(value["inits"])]
        env, extra = (dict(enumerate(value[name])) for name in ("env", "extra"))
        return cls(lab, Path(value["folder"]), env, extra, value["key"])

    def as_json(self) -> dict[str, Any]:
        numbers = range(len(self.nodes))
        return {
            "lab": str(self.lab.folder), "inits": [node.init for node in self.nodes],
            "folder": str(self.folder), "key": self.key,
            "env": [self.env.get(number, {}) for number in numbers],
            "extra": [self.extra.get(number, ()) for number in numbers],
        }  # fmt: skip

    @property
    def nodes(self) -> list[Node]:
        return self.lab.nodes

    def plan(self, **changes: object) -> LaunchPlan:
        head = self.nodes[0]
        count = len(self.nodes)
        ranks = []
        for number, node in enumerate(self.nodes):
            argv = [*FAKE, "--nnodes", str(count), "--node-rank", str(number)]
            argv += ["--master-addr", head.fabric]
            argv += ["--headless"] if number else [
                "--port", "8888", "--served-model-name", "fake"]  # fmt: skip
            env = {
                "GLM_EXL3_GENERATION": "g", "GLM_EXL3_NODES": str(count),
                "GLM_EXL3_NODE_RANK": str(number), "GLM_EXL3_HEAD": head.fabric,
                "GLM_EXL3_HELLO_TIMEOUT_S": "30", "VLLM_HOST_IP": node.fabric,
            } | self.env.get(number, {})  # fmt: skip
            secret = ("VLLM_API_KEY",) if self.key and number == 0 else ()
            ranks.append(RankPlan(
                number, "worker" if number else "head", node.name,
                (*argv, *self.extra.get(number, ())), tuple(sorted(env.items())), secret,
            ))  # fmt: skip
        plan = LaunchPlan(
            runtime="containers", model="/model", served_name="fake", drafting="none",
            base_url="http://127.0.0.1:8888", api_host="127.0.0.1", port=8888,
            master_addr=head.fabric, master_port=29521, ranks=tuple(ranks),
            start_order=(*range(1, count), 0), ready_timeout_s=60, stop_grace_s=5,
        )  # fmt: skip
        return replace(plan, **changes)

    @property
    def secrets(self) -> dict[str, str]:
        return {"VLLM_API_KEY": self.key} if self.key else {}

    @property
    def cluster(self) -> Cluster:
        store = StateStore(self.folder)
        shells = {
            node.name: node.shell if node is self.nodes[0] else node.ssh for node in self.nodes
        }
        box = Box(IMAGE, owner="test@lab")
        return Cluster(store, ContainerRunner(store.launches, shells, dict.fromkeys(shells, box)))

    def launch(self, **changes: object) -> Cluster:
        cluster = self.cluster
        cluster.launch(self.plan(**changes), self.secrets, lambda _name, _seconds: None)
        return cluster
