"""Ray on one node of a launch, and on the head `vllm serve` beside it: the engine of PID 1.

    ray_node.py vllm serve MODEL ... --distributed-executor-backend ...

What: every node starts Ray's processes: the head's begin a cluster, or with GLM_EXL3_RAY_ADDRESS
all join one that is there. Then the head runs the given command, whose executor places the ranks on
the nodes; the others only wait. Why one process for both: a node is of use only while both run.

What must stay true: it ends as soon as Ray's processes or the engine end, and then leaves neither;
asked to stop, it first lets the engine drain. Only processes of this node are ever stopped: a
cluster that was joined goes on without it. Every port that Ray opens lies in one block, between the
nodes' own addresses, so that a firewall can be told.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO

PREFIX = "GLM_EXL3_"
PORTS = 64
WORKER_PORTS = 16
STORE_BYTES = 128 << 20
LOOK_S = 0.2
JOIN_S = 300.0
YOUNG_S = 90.0
KILL_S = 5.0
STARTS = 4
EXIT_NO_RAY = 78
EXIT_RAY_ENDED = 71
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0",
    "RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "300",
}  # fmt: skip
"""No statistics to the vendor, no folded logs, ranks as urgent as any process, nobody who kills
ranks for using memory (on unified memory a healthy engine uses nearly all of it), and patience with
a machine that is busy."""


@dataclass(frozen=True)
class NodeSettings:
    """What this node's environment says.

    ip: its address towards the others. cluster: host:port of the cluster, ours or one to join.
    resource: what marks this launch's nodes in the cluster. gpus: ranks of this node.
    """

    head: bool
    ip: str
    first_port: int
    cluster: str
    joins: bool
    resource: str
    gpus: int


def read_settings(environ: Mapping[str, str]) -> NodeSettings:
    """The settings of this node; raises ValueError or KeyError for an environment without them."""
    first = int(environ[f"{PREFIX}RAY_PORT"])
    address = environ.get(f"{PREFIX}RAY_ADDRESS", "")
    head = environ[f"{PREFIX}HEAD"]
    return NodeSettings(
        head=environ.get(f"{PREFIX}NODE_RANK", "0") == "0",
        ip=environ["VLLM_HOST_IP"],
        first_port=first,
        cluster=address or joined(head, first),
        joins=bool(address),
        resource=f"{PREFIX.lower()}{environ.get(f'{PREFIX}GENERATION') or 'manual'}",
        gpus=int(environ.get(f"{PREFIX}RAY_GPUS", "1")),
    )


def joined(host: str, port: int) -> str:
    """host:port as text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ray_argv(settings: NodeSettings) -> list[str]:
    """The command that runs Ray's processes on this node until one of them ends."""
    first = settings.first_port
    argv = ["ray", "start", "--block", "--disable-usage-stats", "--node-ip-address", settings.ip]
    if settings.head and not settings.joins:
        argv += ["--head", "--port", str(first), "--include-dashboard", "false"]
        argv += ["--ray-client-server-port", str(first + 7)]
    else:
        argv += ["--address", settings.cluster]
    for number, name in enumerate((
        "node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc",
        "dashboard-agent-listen", "metrics-export",
    ), first + 1):  # fmt: skip
        argv += [f"--{name}-port", str(number)]
    argv += ["--min-worker-port", str(first + WORKER_PORTS)]
    argv += ["--max-worker-port", str(first + PORTS - 1)]
    argv += ["--num-cpus", "1", "--num-gpus", str(settings.gpus)]
    argv += ["--resources", json.dumps({settings.resource: settings.gpus})]
    return [*argv, "--object-store-memory", str(STORE_BYTES)]


def engine_environment(settings: NodeSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the head's engine: which cluster, and which of its nodes."""
    return {
        **environ, **QUIET, "RAY_ADDRESS": settings.cluster,
        f"{PREFIX}RAY_RESOURCE": settings.resource,
    }  # fmt: skip


def answers(address: str, timeout_s: float = 2.0) -> bool:
    """Whether somebody listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False


class RayNode:
    """The processes of one node."""

    def __init__(
        self, settings: NodeSettings, argv: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self.settings, self.argv, self.environ = settings, list(argv), dict(environ)
        self.asked = False
        self.starts = 0
        self.since = 0.0
        self.ray: subprocess.Popen[bytes] | None = None
        self.engine: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """The exit code; 0 when it was asked to end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            return self._run()
        finally:
            end(self.engine, 0.0)
            end(self.ray, KILL_S if self.asked else 0.0)

    def _run(self) -> int:
        if not self._wait_for_cluster() or not self._start_ray():
            return 0 if self.asked else EXIT_RAY_ENDED
        assert self.ray is not None
        if self.settings.head:
            env = engine_environment(self.settings, self.environ)
            self.engine = subprocess.Popen(self.argv, env=env)
        while not (self.asked and self.engine is None):
            if self.engine is not None and (code := self.engine.poll()) is not None:
                return code
            if self.ray.poll() is not None and not self._joins_again():
                say(f"error: Ray's processes on this node ended with {self.ray.returncode}")
                return EXIT_RAY_ENDED
            time.sleep(LOOK_S)
        return 0

    def _start_ray(self) -> bool:
        """Whether Ray is up; tried again when it gave up, which it does after 15 s of a busy CPU.

        The engine comes after it, since it takes every core while it is imported.
        """
        # Ray's processes get no key: they are there for every job of a cluster.
        env = {name: value for name, value in self.environ.items() if name != "VLLM_API_KEY"}
        env["AUTOSCALER_METRIC_PORT"] = str(self.settings.first_port + 8)
        here = joined(self.settings.ip, self.settings.first_port + 1)
        while self.starts < STARTS and not self.asked:
            self.starts, self.since = self.starts + 1, time.monotonic()
            self.ray = subprocess.Popen(
                ray_argv(self.settings), env={**env, **QUIET},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
            if self._is_up(self.ray):
                return True
            if not self.asked:
                say(f"Ray did not start at {here}, attempt {self.starts} of {STARTS}")
                end(self.ray, KILL_S)
        if not self.asked:
            say(f"error: Ray does not start at {here}")
        return False

    def _joins_again(self) -> bool:
        """Whether this node joined a head that gave its start up, and has joined the next one."""
        young = time.monotonic() - self.since < YOUNG_S
        if self.asked or self.engine is not None or not young or self.starts >= STARTS:
            return False
        say("Ray ended soon after it joined the cluster, so this node joins it again")
        return self._wait_for_cluster() and self._start_ray()

    def _is_up(self, ray: subprocess.Popen[bytes]) -> bool:
        """Wait for the line that tells that all of Ray's processes run, and pass its output on."""
        up = threading.Event()
        threading.Thread(target=pass_on, args=(ray.stdout, up), daemon=True).start()
        while not up.wait(LOOK_S):
            if ray.poll() is not None or self.asked:
                return False
        return True

    def _wait_for_cluster(self) -> bool:
        """Whether the cluster that this node does not begin itself is there."""
        settings = self.settings
        if settings.head and not settings.joins:
            return True
        deadline = time.monotonic() + JOIN_S
        while not self.asked:
            if answers(settings.cluster):
                return True
            if time.monotonic() > deadline:
                say(f"error: no Ray cluster answers at {settings.cluster} after {JOIN_S:g} s")
                return False
            time.sleep(LOOK_S)
        return False

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        if self.engine is not None:
            self.engine.send_signal(signal.SIGTERM)


def end(process: subprocess.Popen[bytes] | None, grace_s: float) -> None:
    """End one process, kindly for `grace_s`, and what is left of a group that it leads."""
    if process is None:
        return
    if grace_s and process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    if process.poll() is None:
        process.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def pass_on(stream: IO[bytes] | None, up: threading.Event) -> None:
    """Copy Ray's output to ours; `up` is set at the line that says that it runs."""
    for line in stream or ():
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        if b"Ray runtime started" in line:
            up.set()


def say(text: str) -> None:
    sys.stderr.write(f"glm-exl3: {text}\n")
    sys.stderr.flush()


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    try:
        settings = read_settings(environ)
    except (KeyError, ValueError) as error:
        say(f"error: the environment does not say where Ray is: {error}")
        return EXIT_NO_RAY
    if shutil.which("ray", path=environ.get("PATH")) is None:
        say("error: this image has no Ray: build it with EXECUTOR=ray BUILD=1, or use EXECUTOR=mp")
        return EXIT_NO_RAY
    return RayNode(settings, argv, environ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
