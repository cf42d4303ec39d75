"""Which places a launch reserves in Ray, and which variables of the driver no rank gets. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glm_exl3.format.errors import GlmExl3Error

GPU = "GPU"
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
OF_ONE_NODE = frozenset({
    "HOSTNAME", "HOME", "PWD", "LD_PRELOAD", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX",
    "NCCL_IB_DISABLE", "VLLM_NCCL_SO_PATH", "VLLM_CPU_OMP_THREADS_BIND",
})  # fmt: skip


def kept_back(names: Iterable[str]) -> set[str]:
    """The variables of the driver that no rank may get from it: secrets, and what one node has."""
    return {
        name
        for name in names
        if name in OF_ONE_NODE or SECRET.search(name) or name.startswith(("RAY_", "GLM_EXL3_NODE"))
    }


def bundles(ranks: int, resource: str) -> list[dict[str, float]]:
    """What each rank reserves: one GPU on a node that has `resource`."""
    return [{GPU: 1.0, resource: 1.0} for _ in range(ranks)]


def too_few(ranks: int, resource: str, nodes: Sequence[Mapping[str, Any]]) -> GlmExl3Error:
    """The error for a reservation that was not met; `nodes` is what `ray.nodes()` returns."""
    ours = [node for node in nodes if node.get("Alive") and resource in node["Resources"]]
    places = sum(min(node["Resources"].get(GPU, 0), node["Resources"][resource]) for node in ours)
    names = ", ".join(sorted(node["NodeManagerAddress"] for node in ours)) or "none"
    return GlmExl3Error(
        code="ray-places",
        seen=f"Ray has {places:g} of {ranks} places for ranks; nodes of this launch: {names}",
        why="every rank needs a GPU on a node that this launch started",
        fix="look at the logs of the nodes that are missing, and at who holds their GPUs",
    )
