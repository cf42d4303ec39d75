"""The plan: what is run, with which arguments and environment, in which order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.json import JSONSnapshotExtension

from glm_launch.errors import ConfigurationError
from glm_launch.facts import Facts
from glm_launch.plan import LaunchPlan, build, cores_of
from glm_launch.settings_load import load

CPU = Facts(cores=(0, 1), gpus=0, engine=("vllm",))
GPU = Facts(cores=tuple(range(16)), gpus=2, engine=("vllm",))
BASE = {"MODEL": "/models/m", "DFLASH_MODEL": "/models/d"}


def planned(facts: Facts = CPU, **env: str) -> LaunchPlan:
    return build(load(BASE | env, Path("/nonexistent")).settings, facts)


@pytest.fixture
def snapshot_json(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    return snapshot.use_extension(JSONSnapshotExtension)


@pytest.mark.parametrize("method", ["dflash", "mtp", "none"])
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_plan_on_a_cpu(ranks: str, method: str, snapshot_json: SnapshotAssertion) -> None:
    assert planned(RANKS=ranks, SPEC_METHOD=method).as_json() == snapshot_json


def test_plan_on_gpus_with_every_setting(snapshot_json: SnapshotAssertion) -> None:
    plan = planned(
        GPU,
        MODEL_REVISION="abc", DFLASH_REVISION="def", DFLASH_DRAFT_TP="2", HF_HOME="/cache",
        SERVED_MODEL_NAME="glm", PORT="9000", API_HOST="0.0.0.0", VLLM_API_KEY="planted-secret",
        MAX_MODEL_LEN="65536", MAX_NUM_SEQS="8", MAX_NUM_BATCHED_TOKENS="4096",
        GPU_MEM_UTIL="0.9", KV_CACHE_DTYPE="fp8", KV_CACHE_MEMORY_BYTES="1000",
        CUDAGRAPH_SIZES="8,16", LIMIT_MM="image=4", LANGUAGE_MODEL_ONLY="1",
        SKIP_MM_PROFILING="0", EXTRA_ARGS="--seed 3", READY_TIMEOUT_S="60", STOP_GRACE_S="9",
    )  # fmt: skip
    assert plan.as_json() == snapshot_json


def test_workers_start_before_the_head() -> None:
    assert planned(RANKS="4").start_order == (1, 2, 3, 0)


def test_the_key_is_only_named_and_only_for_the_head() -> None:
    plan = planned(VLLM_API_KEY="planted-secret")
    assert "planted-secret" not in json.dumps(plan.as_json())
    assert [rank.secret_env for rank in plan.ranks] == [("VLLM_API_KEY",), ()]


def test_ranks_differ_only_in_place_and_role() -> None:
    head, worker = planned().ranks
    own = {"--node-rank", "0", "1", "--headless"}
    model = head.argv[: head.argv.index("--node-rank")]
    assert worker.argv[: len(model)] == model
    assert set(worker.argv) - set(head.argv) <= own


def test_the_json_reads_back_to_the_same_plan() -> None:
    plan = planned(VLLM_API_KEY="k", LIMIT_MM="image=1")
    assert LaunchPlan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


def test_the_digest_changes_with_what_runs() -> None:
    assert planned().digest == planned().digest
    assert planned().digest != planned(MAX_NUM_SEQS="5").digest


def test_what_a_launch_needs_is_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        build(load({}, Path("/nonexistent")).settings, CPU)
    assert [finding.code for finding in caught.value.findings] == ["no-model", "no-drafter"]


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "shares"),
    [
        ((0, 1), "2", "0", [(0,), (1,)]),
        ((2, 3, 6, 7), "2", "0", [(2, 3), (6, 7)]),
        ((0, 1, 2), "2", "0", [(0,), (1,)]),
        ((0, 1, 2, 3), "2", "1", [(0,), (1,)]),
        ((5,), "2", "0", [(5,), (5,)]),
        ((0, 1), "4", "0", [(0,), (1,), (0,), (1,)]),
        ((0, 1), "1", "64", [(0, 1)]),
    ],
)
def test_cores_are_shared_out(
    cores: tuple[int, ...], ranks: str, threads: str, shares: list[tuple[int, ...]]
) -> None:
    settings = load(BASE | {"RANKS": ranks, "CPU_THREADS": threads}, Path("/nonexistent")).settings
    facts = Facts(cores=cores, gpus=0, engine=("vllm",))
    assert [cores_of(number, settings, facts) for number in range(int(ranks))] == shares


def test_too_few_cores_are_warned_about() -> None:
    assert "share 1 core" in planned(Facts((0,), 0, ("vllm",))).warnings[0]
