"""Environment of the CPU engine, where the user set nothing.

Why this shape: vLLM and its libraries read these variables at import time and in spawned workers,
so they are set before anything else and inherited. `prepare` runs when the platform activates;
`prepare_ranks` when the configuration (ranks, addresses) is known.

What must stay true: a variable that is set stays as it is, with one exception, the model runner:
DFlash2, MTP and the hybrid cache need the second one, so the first is not offered.
"""

from __future__ import annotations

import ipaddress
import os
import socket

DEFAULTS = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def prepare() -> None:
    """Set what every process of the engine needs."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ[RUNNER] = "1"


def is_loopback(address: str) -> bool:
    """Whether `address` (a name or an IP) is this machine's loopback."""
    if address in ("localhost", ""):
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def prepare_ranks(local_ranks: int, nodes: int, master_address: str) -> None:
    """Threads per rank and the interface of gloo, once the number of ranks is known."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // max(1, local_ranks))))
    if nodes > 1 and not is_loopback(master_address):
        return
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
