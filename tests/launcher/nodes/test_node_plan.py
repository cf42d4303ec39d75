"""Plans over nodes for several kits, from the same local plan that one machine would use."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from glm_launch import plan as local_plan
from glm_launch.errors import ConfigurationError
from glm_launch.facts import Facts
from glm_launch.nodes import fabric
from glm_launch.nodes.plan import Mounted, Place, over_nodes
from glm_launch.plan import LaunchPlan
from glm_launch.settings import Settings

sys.path.insert(0, str(Path(__file__).parents[3] / "docker"))
import entrypoint  # noqa: E402

TARGET = Mounted("/models/target/snapshots/abc", "t1")
DRAFTER = Mounted("/models/drafter/snapshots/def", "d1")


def local(ranks: int, **more: object) -> LaunchPlan:
    values = {"MODEL": "org/model", "MODEL_REVISION": "abc", "DFLASH_MODEL": "org/drafter",
              "DFLASH_REVISION": "def", "RANKS": ranks, "HF_HOME": "/home/x/hf"}  # fmt: skip
    settings = Settings.model_validate(values | more)
    return local_plan.build(settings, Facts(cores=(0, 1), gpus=ranks, engine=("/usr/bin/vllm",)))


def places(kit, ranks: int = 1) -> list[Place]:
    choices, found = fabric.choose(kit.endpoints)
    assert not found
    pairs = zip(kit.endpoints, choices, strict=True)
    return [Place(one.facts.host, one.address, choice, ranks) for one, choice in pairs]


def value(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_a_gb10_pair_gets_one_container_each(kit) -> None:
    plan = over_nodes(local(2), places(kit("gb10-pair")), TARGET, DRAFTER, preset="gb10-tp2")
    head, worker = plan.ranks
    assert plan.runtime == "containers" and plan.start_order == (1, 0)
    assert head.argv[:3] == ("vllm", "serve", TARGET.path)
    assert (head.node, worker.node) == ("spark-a", "spark-b")
    for rank in plan.ranks:
        assert value(rank.argv, "--tensor-parallel-size") == "2"
        assert value(rank.argv, "--master-addr") == "192.168.177.11"
        assert value(rank.argv, "--node-rank") == str(rank.rank)
        assert json.loads(value(rank.argv, "--speculative-config"))["model"] == DRAFTER.path
        env = dict(rank.env)
        assert env["NCCL_IB_HCA"] == "=rocep1s0f1:1" and env["GLM_EXL3_MODEL_MANIFEST"] == "t1"
        assert "HF_HOME" not in env and "CUDA_VISIBLE_DEVICES" not in env
    assert "--headless" in worker.argv and "--port" not in worker.argv
    assert "--headless" not in head.argv and value(head.argv, "--port") == "8888"


def test_two_gpus_of_one_host_are_one_container_without_a_meeting_point(kit) -> None:
    plan = over_nodes(local(2), places(kit("cmp170hx-2x"), ranks=2), TARGET, DRAFTER)
    (only,) = plan.ranks
    assert value(only.argv, "--tensor-parallel-size") == "2"
    assert "--nnodes" not in only.argv and "--master-addr" not in only.argv
    assert dict(only.env)["GLM_EXL3_NODES"] == "1"
    assert not any(name.startswith("NCCL_") for name, _ in only.env)


def test_the_entry_point_finds_nothing_to_object_to_and_nothing_that_differs(kit) -> None:
    plan = over_nodes(local(2), places(kit("rtx6000-pair")), TARGET, DRAFTER)
    shared = []
    for rank in plan.ranks:
        settings, problems = entrypoint.read_settings(dict(rank.env))
        assert problems == [] and settings.node_rank == rank.rank
        shared.append((entrypoint.shared_arguments(rank.argv),
                       entrypoint.shared_environment(dict(rank.env))))  # fmt: skip
    assert shared[0] == shared[1]


def test_the_key_is_named_for_the_head_only(kit) -> None:
    made = local(2, VLLM_API_KEY="planted-secret-key")
    plan = over_nodes(made, places(kit("gb10-pair")), TARGET, DRAFTER)
    assert [rank.secret_env for rank in plan.ranks] == [("VLLM_API_KEY",), ()]
    assert "planted-secret-key" not in json.dumps(plan.as_json())


def test_a_plan_over_nodes_survives_its_json(kit) -> None:
    plan = over_nodes(local(2), places(kit("gb10-pair")), TARGET, DRAFTER)
    assert LaunchPlan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


def test_three_nodes_are_refused_with_what_is_allowed(kit) -> None:
    three = [*places(kit("gb10-pair")), places(kit("gb10-pair"))[0]]
    with pytest.raises(ConfigurationError, match="use 1, 2, 4 ranks"):
        over_nodes(local(2), three, TARGET, DRAFTER)
