"""Kits of nodes from `tests/fixtures/nodes`, and ways to change one thing about them."""

from __future__ import annotations

import copy
import json
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glm_launch.nodes import facts
from glm_launch.nodes.fabric import Endpoint
from glm_launch.nodes.facts import NodeFacts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need the lab's packages run when they are asked for by `-m`."""
    here = Path(__file__).parent
    if "lab" in config.option.markexpr:
        return
    lab = [one for one in items if here in one.path.parents and one.get_closest_marker("lab")]
    config.hook.pytest_deselected(items=lab)
    items[:] = [one for one in items if one not in lab]


sys.path.insert(0, str(Path(__file__).parent))

from fake_cluster import Nodes  # noqa: E402

KITS = Path(__file__).parents[2] / "fixtures" / "nodes"
Change = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Kit:
    """Nodes with the fabric address of each; `with_` gives one with node `index` changed."""

    record: dict[str, Any]

    @property
    def nodes(self) -> list[NodeFacts]:
        return [facts.read(node) for node in self.record["nodes"]]

    @property
    def endpoints(self) -> list[Endpoint]:
        pairs = zip(self.record["addresses"], self.nodes, strict=True)
        return [Endpoint(address, node) for address, node in pairs]

    def with_(self, change: Change, index: int = -1) -> Kit:
        record = copy.deepcopy(self.record)
        change(record["nodes"][index])
        return Kit(record)


def load(name: str) -> Kit:
    return Kit(json.loads((KITS / f"{name}.json").read_text()))


@pytest.fixture
def kit() -> Callable[[str], Kit]:
    return load


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    found = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return found


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """A head and a worker made of folders."""
    made = Nodes(tmp_path / "nodes", ("head", "w1"))
    made.make(*free_ports(3))
    yield made
    made.close()
