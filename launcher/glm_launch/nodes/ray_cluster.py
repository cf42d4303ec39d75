"""`EXECUTOR=ray`: what a container gets instead of a rank's number, and what refuses it. Pure.

Every container runs `docker/ray_node.py`, which starts Ray's processes and, on the head, `vllm
serve`; vLLM's Ray executor then places one rank on each GPU of these containers. Nothing else of a
launch differs: hello, canary, supervisor, logs and stop are those of `mp`.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm_launch.errors import Finding
from glm_launch.settings import Settings, is_loopback

PROGRAM = ("python3", "/opt/glm-exl3/ray_node.py")
BACKEND = "glm_exl3.ray.executor.LaunchRayExecutor"
PORTS = 64
NOT_ADDRESSES = {
    "ray": "a Ray client has no place for ranks: name the cluster's own port, mostly 6379",
    "auto": "a container sees no cluster of its machine: name the address",
    "local": "a cluster of one process has no other nodes: leave RAY_ADDRESS empty",
}


@dataclass(frozen=True)
class Ray:
    """`port` is the first of `PORTS`; `address` that of a cluster to join, empty to begin one."""

    port: int
    address: str = ""

    @classmethod
    def of(cls, settings: Settings) -> Ray | None:
        """What the settings ask for; None with EXECUTOR=mp."""
        return cls(settings.RAY_PORT, settings.RAY_ADDRESS) if settings.EXECUTOR == "ray" else None

    def arguments(self, shared: list[str]) -> list[str]:
        """The command of a container; `shared` is `vllm serve` with what all ranks have."""
        return [*PROGRAM, *shared, "--distributed-executor-backend", BACKEND]

    def environment(self, address: str, gpus: int) -> dict[str, str]:
        """The variables of `docker/ray_node.py`; `address` is the node's own, `gpus` its ranks."""
        env = {"GLM_EXL3_RAY_PORT": str(self.port), "GLM_EXL3_RAY_GPUS": str(gpus),
               "VLLM_HOST_IP": address}  # fmt: skip
        return env | ({"GLM_EXL3_RAY_ADDRESS": self.address} if self.address else {})


def ray_ports(settings: Settings, head: bool) -> tuple[int, ...]:
    """Ports that must be free on a node: that of the cluster and that of the node's manager."""
    if settings.EXECUTOR == "mp":
        return ()
    begins = head and not settings.RAY_ADDRESS
    return (*([settings.RAY_PORT] if begins else []), settings.RAY_PORT + 1)


def findings(settings: Settings) -> list[Finding]:
    """Settings that do not go with the executor."""
    if settings.EXECUTOR == "mp":
        return _without_ray(settings)
    return [*_ranks(settings), *_address(settings), *_ports(settings)]


def _without_ray(settings: Settings) -> list[Finding]:
    if not settings.RAY_ADDRESS:
        return []
    return [
        Finding(
            "ray-address",
            f"RAY_ADDRESS={settings.RAY_ADDRESS} with EXECUTOR=mp",
            "mp starts its ranks itself and joins no cluster, so the address would do nothing",
            "set EXECUTOR=ray to join that cluster, or unset RAY_ADDRESS",
        )
    ]


def _ranks(settings: Settings) -> list[Finding]:
    if settings.runtime == "local":
        return [
            Finding(
                "ray-local",
                "EXECUTOR=ray with RUNTIME=local",
                "Ray joins containers of nodes; ranks of one machine need nobody to place them",
                "set WORKER_IP, IMAGE or RUNTIME=containers, or EXECUTOR=mp",
            )
        ]
    if settings.tensor_parallel == 1:
        return [
            Finding(
                "ray-one-rank",
                "EXECUTOR=ray with one rank",
                "a single rank runs in the engine's own process and is placed by nobody",
                "set WORKER_IP or GPUS_PER_NODE, or EXECUTOR=mp",
            )
        ]
    return []


def _address(settings: Settings) -> list[Finding]:
    address = settings.RAY_ADDRESS
    word = address.partition("://")[0]
    if word in NOT_ADDRESSES:
        return [
            Finding(
                "ray-address", f"RAY_ADDRESS={address}", NOT_ADDRESSES[word],
                "set RAY_ADDRESS to HOST:PORT, or leave it empty to begin a cluster",
            )
        ]  # fmt: skip
    host = address.rpartition(":")[0].strip("[]")
    if not address or not settings.WORKER_IP or not is_loopback(host):
        return []
    return [
        Finding(
            "ray-address",
            f"RAY_ADDRESS={address} with WORKER_IP={','.join(settings.WORKER_IP)}",
            "the workers join the cluster, too, and reach it at that address",
            "name the cluster's address on a network that every node reaches",
        )
    ]


def _ports(settings: Settings) -> list[Finding]:
    first, last = settings.RAY_PORT, settings.RAY_PORT + PORTS - 1
    used = {name: int(getattr(settings, name)) for name in ("PORT", "WATCH_PORT")}
    host, _, port = settings.RAY_ADDRESS.rpartition(":")
    if port.isdigit() and host.strip("[]") in (settings.HEAD_IP, *settings.WORKER_IP):
        used["RAY_ADDRESS"] = int(port)
    inside = [f"{name}={port}" for name, port in used.items() if first <= port <= last]
    if not inside and last <= 65535:
        return []
    seen = f"RAY_PORT={first} takes the ports {first} to {last}"
    return [
        Finding(
            "ray-ports",
            f"{seen}, and {', '.join(inside)} lies there" if inside else seen,
            "Ray's processes need all of them on every node" if inside else "65535 is the last",
            "choose another RAY_PORT",
        )
    ]
