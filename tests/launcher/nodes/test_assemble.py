"""Plans, containers, floors and memory for recorded kits and the presets made for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm_launch.errors import LaunchFailedError
from glm_launch.nodes import assemble, models, steps, supply
from glm_launch.nodes.manifest import Entry, Manifest
from glm_launch.nodes.memory import GIB
from glm_launch.nodes.memory_watch import MemoryWatch, watching
from glm_launch.nodes.plan import Mounted
from glm_launch.nodes.sites import Survey, sites_of
from glm_launch.nodes.ssh import LocalShell
from glm_launch.plan import LaunchPlan
from glm_launch.settings import Settings
from glm_launch.settings_load import load

BASE = {"MODEL": "org/model", "DFLASH_MODEL": "org/drafter", "GLM_STATE_DIR": "/state"}
PAIR = {"HEAD_IP": "192.168.177.11", "WORKER_IP": "192.168.177.12", "WORKER_USER": "me"}
MOUNTED = [Mounted("/models/target/snapshots/abc", "t"), Mounted("/models/drafter/x", "d")]
KITS = {
    "gb10-tp2": ("gb10-pair", PAIR), "cmp170hx-2x": ("cmp170hx-2x", {}),
    "h200-2x": ("h200-2x", {}), "h200-1x": ("h200-2x", {}),
}  # fmt: skip


def settings_of(preset: str, **more: str) -> Settings:
    env = BASE | KITS[preset][1] | {"PRESET": preset} | more
    return load(env, Path("/nonexistent")).settings


def survey_of(kit, preset: str, settings: Settings) -> Survey:
    nodes = kit(KITS[preset][0]).nodes[: settings.nodes]
    return Survey(tuple(sites_of(settings)), tuple(nodes))


def planned(kit, preset: str, **more: str) -> tuple[LaunchPlan, Survey, Settings]:
    settings = settings_of(preset, **more)
    looked = survey_of(kit, preset, settings)
    choices, wrong = looked.choices(settings)
    assert not wrong
    mounts = {"" if not index else site.address: (("/hub/m", "/models/target"),)
              for index, site in enumerate(looked.sites)}  # fmt: skip
    image = supply.local_name(supply.image_name(settings))
    return assemble.plan(settings, looked, choices, MOUNTED, mounts, image), looked, settings


def test_two_sparks_get_a_container_each_with_rdma(kit) -> None:
    plan, _, _ = planned(kit, "gb10-tp2", IMAGE="reg.example/glm@sha256:" + "ab" * 32)
    assert [rank.ssh for rank in plan.ranks] == ["", "me@192.168.177.12"]
    for rank in plan.ranks:
        assert rank.box is not None
        assert (rank.box.gpus, rank.box.rdma, rank.box.image) == (
            "all", True, "glm-exl3:pinned-abababababababab",
        )  # fmt: skip
        env = dict(rank.env)
        assert env["GLM_EXL3_PRESET"] == "gb10-tp2" and "VLLM_CPU_OMP_THREADS_BIND" not in env
        assert rank.argv[rank.argv.index("--max-model-len") + 1] == "850000"
        assert rank.argv[rank.argv.index("--kv-cache-memory-bytes") + 1] == str(14 * GIB)


def test_two_gpus_of_one_host_are_one_container_and_need_no_ssh(kit) -> None:
    plan, looked, settings = planned(kit, "cmp170hx-2x")
    (only,) = plan.ranks
    assert only.ssh == "" and only.box is not None and only.box.gpus == "all"
    assert only.argv[only.argv.index("--tensor-parallel-size") + 1] == "2"
    wanted = supply.supply_of(settings)
    made = [*steps.image_steps(wanted, looked, 28), *steps.rank_steps(plan, [LocalShell()],
            Path("/state/keys"))]  # fmt: skip
    assert not any("ssh" in step.argv for step in made)
    assert made[-1].argv[:2] == ("docker", "run")


def test_one_of_two_gpus_is_named(kit) -> None:
    plan, _, _ = planned(kit, "h200-1x")
    assert plan.ranks[0].box is not None and plan.ranks[0].box.gpus == '"device=0"'


def test_the_library_of_the_host_is_mounted_on_demand(kit) -> None:
    settings = settings_of("h200-2x", USE_HOST_NCCL="1")
    looked = survey_of(kit, "h200-2x", settings)
    (finding,) = assemble.nccl_findings(settings, looked)
    assert "has no libnccl.so.2" in finding.seen
    nodes = kit("h200-2x").with_(lambda node: node.update(nccl="/usr/lib/libnccl.so.2")).nodes
    looked = Survey(looked.sites, tuple(nodes))
    assert assemble.nccl_findings(settings, looked) == []
    mounts = {"": (("/hub/m", "/models/target"),)}
    choices, _ = looked.choices(settings)
    (rank,) = assemble.plan(settings, looked, choices, MOUNTED, mounts, "i").ranks
    assert rank.box and ("/usr/lib/libnccl.so.2", assemble.NCCL_INSIDE) in rank.box.mounts
    assert dict(rank.env)["VLLM_NCCL_SO_PATH"] == assemble.NCCL_INSIDE


def test_devices_that_are_asked_for_are_verified(kit) -> None:
    for change, code in (
        ({"HEAD_CX7_IF": "enP7s7"}, "nic-without-address"),
        ({"WORKER_CX7_IB": "mlx5_9"}, "no-such-hca"),
    ):
        settings = settings_of("gb10-tp2", **change)
        _, wrong = survey_of(kit, "gb10-tp2", settings).choices(settings)
        assert code in [finding.code for finding in wrong]


def test_a_forced_gid_index_is_passed_on_and_none_otherwise(kit) -> None:
    plan, _, _ = planned(kit, "gb10-tp2", NCCL_IB_GID_INDEX="5")
    assert dict(plan.ranks[1].env)["NCCL_IB_GID_INDEX"] == "5"
    plan, _, _ = planned(kit, "gb10-tp2")
    assert "NCCL_IB_GID_INDEX" not in dict(plan.ranks[1].env)


def test_unified_memory_has_a_floor_and_cards_of_their_own_have_none(kit) -> None:
    settings = settings_of("gb10-tp2")
    found = assemble.floors(settings, survey_of(kit, "gb10-tp2", settings))
    assert found == {"spark-a": 6 * GIB, "spark-b": 6 * GIB}
    settings = settings_of("h200-2x")
    assert set(assemble.floors(settings, survey_of(kit, "h200-2x", settings)).values()) == {0}
    settings = settings_of("gb10-tp2", MEM_FLOOR_GIB="9")
    looked = survey_of(kit, "gb10-tp2", settings)
    assert set(assemble.floors(settings, looked).values()) == {9 * GIB}


def test_f7_memory_is_judged_from_the_manifest_and_the_preset(kit) -> None:
    settings = settings_of("gb10-tp2")
    looked = survey_of(kit, "gb10-tp2", settings)
    fits = Manifest("m", "r", "hub", (Entry("a.safetensors", 164 * GIB, "sha256:x"),))
    assert assemble.memory_findings(settings, looked, [fits]) == []
    large = Manifest("m", "r", "hub", (Entry("a.safetensors", 240 * GIB, "sha256:x"),))
    found = assemble.memory_findings(settings, looked, [large])
    assert [finding.code for finding in found] == ["too-little-memory"] * 2
    assert "weights 120.0 GiB" in found[0].seen


def test_a_preset_for_other_gpus_is_a_warning(kit) -> None:
    settings = settings_of("h200-2x")
    looked = survey_of(kit, "h200-2x", settings)
    assert assemble.hardware_warnings(settings, looked) == []
    other = Survey(looked.sites, tuple(kit("cmp170hx-2x").nodes))
    (warning,) = assemble.hardware_warnings(settings, other)
    assert "is for h200 (9.0)" in warning.seen and "CMP 170HX" in warning.seen


@pytest.mark.parametrize(
    ("home", "shared", "expected"),
    [("/home/ops", False, "/home/ops/hf/m"), ("~", False, "~/hf/m"), ("/x", True, None)],
)
def test_weights_lie_below_the_home_of_the_worker(home, shared, expected) -> None:
    root = Path.home() / "hf" / "m"
    assert models.root_on(root, home, shared=shared) == (expected or str(root))
    assert models.root_on(Path("/data/m"), home, shared=False) == "/data/m"


def test_cores_are_shared_out_within_a_node() -> None:
    settings = load(BASE | {"IMAGE": "i", "GPUS_PER_NODE": "2", "DEVICE": "cpu"},
                    Path("/nonexistent")).settings  # fmt: skip
    env = assemble.cpu_environment(settings, 0, 4)
    assert env == {"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "0,1|2,3"}
    one = settings.model_copy(update={"CPU_THREADS": 1, "GPUS_PER_NODE": 1})
    binds = [assemble.cpu_environment(one, node, 2)["VLLM_CPU_OMP_THREADS_BIND"] for node in (0, 1)]
    assert binds == ["0", "1"]


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_an_image_by_digest_is_pulled_for_the_platform_and_named(arch: str) -> None:
    wanted = supply.Supply("reg.example/glm@sha256:" + "cd" * 32)
    pull, tag = supply.commands(wanted, arch)
    assert pull[3] == ("linux/amd64" if arch == "x86_64" else "linux/arm64")
    assert tag == ["docker", "tag", wanted.name, "glm-exl3:pinned-cdcdcdcdcdcdcdcd"]


@pytest.mark.parametrize(
    ("name", "registry"),
    [
        ("ghcr.io/a/b:1", ["ghcr.io"]), ("localhost:5000/b", ["localhost:5000"]),
        ("a/b:1", []), ("glm-exl3:cuda", []),
    ],
)  # fmt: skip
def test_the_registry_of_an_image(name: str, registry: list[str]) -> None:
    assert supply.registry_of(name) == registry


def test_f7_a_load_that_comes_near_the_floor_is_stopped() -> None:
    watch = MemoryWatch({"a": 6 * GIB, "b": 6 * GIB})
    watch.take("a", 7 * GIB)
    watch.take("a", 5 * GIB)
    watch.check()
    watch.take("a", 5 * GIB)
    with pytest.raises(LaunchFailedError, match=r"a: 5.0 GiB left while loading, the floor is 6"):
        watch.check()
    assert watch.lowest() == {"a": 5 * GIB}


def test_memory_is_sampled_each_second_until_the_block_ends() -> None:
    import time

    with watching([("here", LocalShell()), ("free", LocalShell())], {"here": 1, "free": 0}) as seen:
        deadline = time.monotonic() + 20
        while len(seen.samples.get("here", [])) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        seen.check()
    assert set(seen.samples) == {"here"} and seen.lowest()["here"] > GIB
    json.dumps(seen.samples)
