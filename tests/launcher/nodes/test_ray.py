"""`EXECUTOR=ray`: what goes with it, what the containers then run, and that `mp` stays as it is."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.json import JSONSnapshotExtension

from glm_launch import plan as local_plan
from glm_launch.errors import ConfigurationError, ExitCode
from glm_launch.facts import Facts
from glm_launch.nodes import fabric, ray_cluster, supply
from glm_launch.nodes.plan import Mounted, Place, over_nodes
from glm_launch.nodes.ray_cluster import BACKEND, PORTS, Ray
from glm_launch.plan import LaunchPlan
from glm_launch.settings import Settings
from glm_launch.settings_load import load

sys.path.insert(0, str(Path(__file__).parents[3] / "docker"))
import entrypoint  # noqa: E402
import ray_node  # noqa: E402

NO_FILE = Path("/nonexistent/.env")
PAIR = {"EXECUTOR": "ray", "HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2"}
TARGET = Mounted("/models/target/snapshots/abc", "t1")


@pytest.fixture
def snapshot_json(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    return snapshot.use_extension(JSONSnapshotExtension)


def planned(kit, name: str = "gb10-pair", *, executor: str = "ray", **more: str) -> LaunchPlan:
    endpoints = kit(name).endpoints
    choices, wrong = fabric.choose(endpoints)
    assert not wrong
    values = {
        "MODEL": "org/model", "SPEC_METHOD": "none", "EXECUTOR": executor, "RANKS": 2,
        "HEAD_IP": endpoints[0].address, "WORKER_IP": [one.address for one in endpoints[1:]],
    } | more  # fmt: skip
    settings = Settings.model_validate(values)
    local = local_plan.build(settings, Facts(cores=(0, 1), gpus=2, engine=("vllm",)))
    pairs = zip(endpoints, choices, strict=True)
    places = [Place(one.facts.host, one.address, choice) for one, choice in pairs]
    return over_nodes(local, places, TARGET, ray=Ray.of(settings))


@pytest.mark.parametrize(
    ("env", "code", "said"),
    [
        ({"RAY_ADDRESS": "10.0.0.9:6379"}, "ray-address", "mp starts its ranks itself"),
        ({"EXECUTOR": "ray"}, "ray-local", "RUNTIME=local"),
        ({"EXECUTOR": "ray", "IMAGE": "x:1"}, "ray-one-rank", "one rank"),
        ({"EXECUTOR": "ray", "PRESET": "h200-1x"}, "ray-one-rank", "GPUS_PER_NODE"),
        (PAIR | {"RAY_ADDRESS": "ray://10.0.0.9:10001"}, "ray-address", "a Ray client"),
        (PAIR | {"RAY_ADDRESS": "auto"}, "ray-address", "name the address"),
        (PAIR | {"RAY_ADDRESS": "local"}, "ray-address", "leave RAY_ADDRESS empty"),
        (PAIR | {"RAY_ADDRESS": "127.0.0.1:6379"}, "ray-address", "the workers join"),
        (PAIR | {"RAY_ADDRESS": "[::1]:6379"}, "ray-address", "the workers join"),
        (PAIR | {"RAY_PORT": "8880"}, "ray-ports", "PORT=8888 lies there"),
        (PAIR | {"RAY_PORT": "29500"}, "ray-ports", "WATCH_PORT=29522 lies there"),
        (PAIR | {"RAY_PORT": "65500"}, "ray-ports", "65535 is the last"),
        (PAIR | {"RAY_ADDRESS": "10.0.0.2:29540"}, "ray-ports", "RAY_ADDRESS=29540 lies there"),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_reason(env, code, said) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(env, NO_FILE)
    assert caught.value.exit_code == ExitCode.BAD_CONFIGURATION == 2
    assert [found.code for found in caught.value.findings] == [code]
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "more", [{}, {"RAY_ADDRESS": "10.0.0.9:6379"}, {"RAY_ADDRESS": "10.0.0.1:6379"}]
)
def test_a_pair_may_begin_a_cluster_or_join_one(more) -> None:
    settings = load(PAIR | more, NO_FILE).settings
    assert Ray.of(settings) == Ray(29530, more.get("RAY_ADDRESS", ""))
    assert ray_cluster.ray_ports(settings, True) == ((29531,) if more else (29530, 29531))
    assert ray_cluster.ray_ports(settings, False) == (29531,)


@given(port=st.integers(1, 65535), watch=st.integers(1, 65535))
def test_no_accepted_block_of_ports_holds_another_port(port: int, watch: int) -> None:
    values = PAIR | {"RAY_PORT": port, "WATCH_PORT": watch, "WORKER_IP": ("10.0.0.2",)}
    settings = Settings.model_validate(values)
    block = range(port, port + PORTS)
    good = not ray_cluster.findings(settings)
    assert good == (watch not in block and 8888 not in block and block[-1] <= 65535)


@pytest.mark.parametrize("address", ["", "10.9.9.9:6379"], ids=["begun", "joined"])
def test_the_plan_over_ray(kit, address: str, snapshot_json: SnapshotAssertion) -> None:
    assert planned(kit, RAY_ADDRESS=address).as_json() == snapshot_json


def test_every_container_gets_what_its_program_reads(kit) -> None:
    plan = planned(kit)
    for rank, address in zip(plan.ranks, ("192.168.177.11", "192.168.177.12"), strict=True):
        assert rank.argv[:3] == ("python3", "/opt/glm-exl3/ray_node.py", "vllm")
        assert rank.argv[rank.argv.index("--distributed-executor-backend") + 1] == BACKEND
        assert not {"--nnodes", "--node-rank", "--master-addr", "--headless"} & {*rank.argv}
        found = ray_node.read_settings(dict(rank.env) | {"GLM_EXL3_GENERATION": "g"})
        assert (found.ip, found.head, found.cluster, found.resource, found.gpus) == (
            address, rank.rank == 0, "192.168.177.11:29530", "glm_exl3_g", 1,
        )  # fmt: skip
    assert "--port" in plan.ranks[0].argv and "--port" not in plan.ranks[1].argv


def test_the_entry_point_finds_nothing_that_differs_between_the_nodes(kit) -> None:
    shared = []
    for rank in planned(kit, RAY_ADDRESS="10.9.9.9:6379").ranks:
        settings, problems = entrypoint.read_settings(dict(rank.env))
        assert problems == [] and settings.node_rank == rank.rank
        shared.append((entrypoint.shared_arguments(rank.argv),
                       entrypoint.shared_environment(dict(rank.env))))  # fmt: skip
    assert shared[0] == shared[1]
    assert dict(shared[0][1])["GLM_EXL3_RAY_ADDRESS"] == "10.9.9.9:6379"


def test_mp_is_what_it_was_and_reads_back_from_json(kit) -> None:
    plan = planned(kit, executor="mp")
    for rank in plan.ranks:
        assert rank.argv[0] == "vllm" and "ray" not in shlex.join(rank.argv)
        assert not any("RAY" in name for name, _ in rank.env)
    for one in (plan, planned(kit)):
        assert LaunchPlan.from_json(json.loads(json.dumps(one.as_json()))) == one


def test_the_built_image_is_the_one_with_ray() -> None:
    for device in ("cpu", "cuda"):
        settings = load(PAIR | {"BUILD": "1", "DEVICE": device}, NO_FILE).settings
        wanted = supply.supply_of(settings)
        assert wanted.name == f"glm-exl3:{device}-ray"
        assert supply.build_argv(wanted, "linux/amd64")[-1] == f"{device}-ray"
    named = load(PAIR | {"IMAGE": "mine:1"}, NO_FILE).settings
    assert supply.image_name(named) == "mine:1"
