"""The edge that supervision stands on: plan schema, runner, cluster, states, labels, codes, hello.

What is asserted here is frozen: a change needs a new schema or protocol number.
"""

from __future__ import annotations

import inspect
import json
import sys
import typing
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest

from glm_launch import keeper, plan, runner
from glm_launch.lifecycle import Cluster
from glm_launch.nodes import docker_cli, preflight
from glm_launch.nodes.runner import ContainerRunner
from glm_launch.plan import Box, LaunchPlan, RankPlan
from glm_launch.runner import LocalRunner, NodeState, Runner
from glm_launch.runners import PlannedRunner
from glm_launch.state import StateStore

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docker"))
import entrypoint  # noqa: E402
import hello  # noqa: E402

SCHEMA = json.loads((ROOT / "launcher/glm_launch/launch_plan.schema.json").read_text())
SNAPSHOTS = sorted((Path(__file__).parent / "__snapshots__" / "test_plan").glob("*.json"))
BOX = Box("image", (("/a", "/models/target"),), gpus="all", rdma=True, owner="me@here")


def valid(value: object) -> None:
    jsonschema.validate(value, SCHEMA)


@pytest.mark.parametrize("path", SNAPSHOTS, ids=[path.stem for path in SNAPSHOTS])
def test_plans_of_local_ranks_follow_the_schema(path: Path) -> None:
    valid(json.loads(path.read_text()))


def test_a_plan_over_nodes_follows_the_schema_and_reads_back(plan: LaunchPlan) -> None:
    ranks = tuple(RankPlan(number, role, "n", ("vllm", "serve"), (("A", "1"),), (), "n", BOX)
                  for number, role in enumerate(("head", "worker")))  # fmt: skip
    made = LaunchPlan(**{field.name: getattr(plan, field.name) for field in fields(plan)}
                      | {"ranks": ranks, "runtime": "containers"})  # fmt: skip
    text = json.dumps(made.as_json())
    valid(json.loads(text))
    assert LaunchPlan.from_json(json.loads(text)) == made


def test_the_schema_names_every_field() -> None:
    known = SCHEMA["properties"]
    assert {field.name for field in fields(LaunchPlan)} | {"schema", "digest", "steps"} == set(
        known
    )
    rank = known["ranks"]["items"]["properties"]
    assert {field.name for field in fields(RankPlan)} == set(rank)
    box = rank["box"]["anyOf"][1]["properties"]
    assert {field.name for field in fields(Box)} == set(box)
    assert known["schema"]["const"] == plan.SCHEMA


@pytest.mark.parametrize(
    "change",
    [{"schema": 2}, {"runtime": "podman"}, {"port": 0}, {"extra": 1}, {"digest": "x"}],
)
def test_what_is_no_plan_is_refused(plan: LaunchPlan, change: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        valid(json.loads(json.dumps(plan.as_json())) | change)


def test_a_plan_of_before_reads_without_the_fields_of_today(plan: LaunchPlan) -> None:
    value = json.loads(json.dumps(plan.as_json()))
    for rank in value["ranks"]:
        del rank["ssh"], rank["box"]
    assert LaunchPlan.from_json(value) == plan


@pytest.mark.parametrize("kind", [LocalRunner, ContainerRunner, PlannedRunner])
def test_every_runner_has_the_methods_of_the_protocol(kind: type) -> None:
    for name in ("start", "observe", "stop", "log"):
        wanted = inspect.signature(getattr(Runner, name)).parameters
        assert list(inspect.signature(getattr(kind, name)).parameters) == list(wanted)


def test_the_cluster_starts_a_named_generation_and_stops_twice(
    tmp_path: Path, plan: LaunchPlan, fake_runner
) -> None:
    store = StateStore(tmp_path / "state")
    cluster = Cluster(store, fake_runner)
    current = cluster.start(plan, "20260101-000000-abcd")
    assert current.generation == "20260101-000000-abcd"
    assert (store.launches / current.generation / "plan.json").is_file()
    states = cluster.observe()
    assert [type(state) for state in states] == [NodeState, NodeState]
    assert cluster.stop() is True and cluster.stop() is False and cluster.observe() == []


def test_the_states_of_a_node() -> None:
    assert typing.get_args(runner.State) == ("running", "exited", "orphaned", "lost", "absent")
    assert [field.name for field in fields(NodeState)] == [
        "rank", "role", "node", "state", "pid", "exit_code", "asked", "started_at", "ended_at",
        "log",
    ]  # fmt: skip


def test_labels_and_names_of_containers() -> None:
    assert docker_cli.name_of(1) == "glm-exl3-node1"
    argv = docker_cli.run_argv(BOX, 1, "g1", ("vllm",), (), grace_s=5)
    labels = dict(argv[i + 1].split("=", 1) for i, part in enumerate(argv) if part == "--label")
    assert labels == {
        "io.glm-exl3.project": "glm-exl3", "io.glm-exl3.generation": "g1",
        "io.glm-exl3.owner": "me@here", "io.glm-exl3.node-rank": "1",
    }  # fmt: skip
    assert preflight.PROJECT_LABEL == "io.glm-exl3.project"


def test_exit_codes() -> None:
    assert (hello.EXIT_ENGINE, hello.EXIT_DIFFERS, keeper.EXIT_UNASKED) == (70, 78, 70)
    assert entrypoint.EXIT_ENGINE == 70


def test_hello_messages() -> None:
    mine = hello.Hello("g", 1, 2, "node", "p", "m", "d", ("serve",), (("A", "1"),))
    said = json.loads(mine.line())
    assert set(said) == {
        "type", "protocol", "generation", "node_rank", "nodes", "node", "plugin", "model",
        "drafter", "arguments", "arguments_hash", "environment", "environment_hash",
    }  # fmt: skip
    assert (said["type"], said["protocol"]) == ("hello", 1)
    assert hello.Hello.parse(said) == mine
