"""Turn the plan of local ranks into one of containers over nodes.

Pure. The local plan already holds every argument that all ranks share; what changes is who runs
where: one container per node with all its ranks, addresses and devices as the fabric was chosen,
model folders as they are mounted, and the variables of the entry point. The generation is not part
of a plan: the runner adds it when it starts a container.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from glm_launch.nodes.fabric import Choice
from glm_launch.nodes.presets import tensor_parallel
from glm_launch.nodes.ray_cluster import Ray
from glm_launch.plan import LaunchPlan, RankPlan

ENGINE = "vllm"
NODE_FLAGS = {
    "--tensor-parallel-size": 1, "--distributed-executor-backend": 1, "--nnodes": 1,
    "--node-rank": 1, "--master-addr": 1, "--master-port": 1, "--headless": 0,
}  # fmt: skip
LOCAL_ONLY = frozenset({
    "CUDA_VISIBLE_DEVICES", "HF_HOME", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP",
})  # fmt: skip


@dataclass(frozen=True)
class Place:
    """One node of the launch: the name it is reached by, its fabric address, what it uses there."""

    name: str
    address: str
    choice: Choice
    ranks: int = 1


@dataclass(frozen=True)
class Mounted:
    """A verified model as the container sees it."""

    path: str
    digest: str


def over_nodes(
    local: LaunchPlan,
    places: Sequence[Place],
    target: Mounted,
    drafter: Mounted | None = None,
    *,
    watch_port: int = 29522,
    preset: str = "",
    ray: Ray | None = None,
) -> LaunchPlan:
    """The plan with one container per place, the first of which is the head.

    With `ray` the containers are nodes of a Ray cluster, on which vLLM places the ranks.

    Raises `ConfigurationError` when the ranks make no tensor parallelism that the model allows.
    """
    head = places[0]
    ranks = sum(place.ranks for place in places)
    tensor_parallel(1, ranks)
    template = local.ranks[0]
    shared = _shared(template.argv, target, drafter)
    containers = []
    for number, place in enumerate(places):
        argv = [*shared, "--tensor-parallel-size", str(ranks)]
        if ray:
            argv = ray.arguments(without_api(argv) if number else argv)
        else:
            argv += _meeting(local, head.address, number, len(places), ranks)
            argv = without_api(argv) + ["--headless"] if number else argv
        env = {name: value for name, value in template.env if name not in LOCAL_ONLY}
        env |= place.choice.environment(place.address) if len(places) > 1 else {}
        env |= {
            "GLM_EXL3_NODES": str(len(places)), "GLM_EXL3_NODE_RANK": str(number),
            "GLM_EXL3_HEAD": head.address, "GLM_EXL3_WATCH_PORT": str(watch_port),
            "GLM_EXL3_MODEL_MANIFEST": target.digest,
        }  # fmt: skip
        env |= {"GLM_EXL3_DRAFTER_MANIFEST": drafter.digest} if drafter else {}
        env |= {"GLM_EXL3_PRESET": preset} if preset else {}
        env |= ray.environment(place.address, place.ranks) if ray else {}
        containers.append(
            RankPlan(
                rank=number,
                role="worker" if number else "head",
                node=place.name,
                argv=tuple(argv),
                env=tuple(sorted(env.items())),
                secret_env=() if number else template.secret_env,
            )
        )
    return replace(
        local,
        runtime="containers",
        model=target.path,
        master_addr=head.address,
        ranks=tuple(containers),
        start_order=(*range(1, len(places)), 0),
    )


def _meeting(local: LaunchPlan, head: str, number: int, nodes: int, ranks: int) -> list[str]:
    """Where the ranks of `mp` meet."""
    argv = ["--distributed-executor-backend", "mp"] if ranks > 1 else []
    if nodes > 1:
        argv += ["--nnodes", str(nodes), "--node-rank", str(number)]
        argv += ["--master-addr", head, "--master-port", str(local.master_port)]
    return argv


API_FLAGS = {
    "--host": 1, "--port": 1, "--served-model-name": 1, "--reasoning-parser": 1,
    "--tool-call-parser": 1, "--enable-auto-tool-choice": 0,
}  # fmt: skip


def without_api(argv: Sequence[str]) -> list[str]:
    """The arguments without those that only the head's API server takes."""
    return _without(argv, API_FLAGS)


def _shared(argv: Sequence[str], target: Mounted, drafter: Mounted | None) -> list[str]:
    """From `serve` on, with mounted paths and without what belongs to one rank."""
    kept = _without(argv[argv.index("serve") :], NODE_FLAGS | {"--revision": 1})
    kept[1] = target.path
    if "--speculative-config" in kept and drafter is not None:
        at = kept.index("--speculative-config") + 1
        config = json.loads(kept[at])
        config.pop("revision", None)
        kept[at] = json.dumps(config | {"model": drafter.path})
    return [ENGINE, *kept]


def _without(argv: Sequence[str], flags: dict[str, int]) -> list[str]:
    kept: list[str] = []
    parts = iter(argv)
    for part in parts:
        flag, equals, _ = part.partition("=")
        if flag not in flags:
            kept.append(part)
        elif flags[flag] and not equals:
            next(parts, None)
    return kept
