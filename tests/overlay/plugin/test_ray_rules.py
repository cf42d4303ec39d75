"""What a launch reserves in Ray, and which variables vLLM's driver keeps to itself."""

from __future__ import annotations

import pytest

from glm_exl3.ray import rules

RESOURCE = "glm_exl3_g1"


def node(address: str, gpus: float, marks: float, *, alive: bool = True) -> dict[str, object]:
    resources = (
        {"CPU": 1.0} | ({"GPU": gpus} if gpus else {}) | ({RESOURCE: marks} if marks else {})
    )
    return {"Alive": alive, "NodeManagerAddress": address, "Resources": resources}


@pytest.mark.parametrize(
    "name",
    ["VLLM_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "RAY_ADDRESS", "RAY_AUTH_TOKEN",
     "GLM_EXL3_NODE_RANK", "GLM_EXL3_NODES", "HOSTNAME", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME",
     "VLLM_CPU_OMP_THREADS_BIND"],
)  # fmt: skip
def test_secrets_and_what_one_node_has_stay_with_the_driver(name: str) -> None:
    assert rules.kept_back([name, "VLLM_LOGGING_LEVEL"]) == {name}


def test_what_all_ranks_share_is_carried() -> None:
    assert not rules.kept_back(["GLM_EXL3_BACKEND", "VLLM_USE_V2_MODEL_RUNNER", "NCCL_DEBUG"])


def test_every_rank_reserves_one_gpu_on_a_node_of_the_launch() -> None:
    assert rules.bundles(2, RESOURCE) == [{"GPU": 1.0, RESOURCE: 1.0}] * 2


def test_a_missing_node_and_a_foreign_one_are_told_apart() -> None:
    nodes = [node("10.0.0.1", 1, 1), node("10.0.0.2", 1, 1, alive=False), node("10.0.0.9", 8, 0)]
    error = rules.too_few(2, RESOURCE, nodes)
    assert error.code == "ray-places"
    assert "1 of 2 places" in error.seen and error.seen.endswith("this launch: 10.0.0.1")
    assert "none" in rules.too_few(2, RESOURCE, nodes[2:]).seen
