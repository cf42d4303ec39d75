"""The real server on bad input: one clear error, an exit status that is not 0, nothing served."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from service import free_port

pytestmark = pytest.mark.engine

DEADLINE_S = 240
POLL_S = 0.3
SERVE = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
COMMON = [
    "--max-model-len",
    "1024",
    "--enforce-eager",
    "--language-model-only",
    "--max-num-seqs",
    "4",
]


def environment(**extra: str) -> dict[str, str]:
    local = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **local, **extra}


class Server:
    """One `vllm serve` in a process group of its own, its output in a file."""

    def __init__(self, arguments: Sequence[str], log: Path, **extra: str) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [*SERVE, *arguments],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env=environment(**extra),
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def served(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def outcome(servers: Sequence[Server], port: int) -> list[int]:
    """Exit statuses of all servers; fails when one serves or is still there at the deadline."""
    try:
        until = time.monotonic() + DEADLINE_S
        while any(server.process.poll() is None for server in servers):
            assert not served(port), "it serves"
            assert time.monotonic() < until, "it hangs"
            time.sleep(POLL_S)
        return [server.process.returncode for server in servers]
    finally:
        for server in servers:
            server.kill()


def alone(folder: Path, log: Path) -> str:
    port = free_port()
    server = Server([str(folder), *COMMON, "--port", str(port)], log)
    assert outcome([server], port)[0] != 0, server.output[-3000:]
    return server.output


def nodes(model: Path, logs: Path, *extra: dict[str, str]) -> list[str]:
    """A head and a headless worker; both must end by themselves with a failure."""
    port, master = free_port(), free_port()
    shared = [str(model), *COMMON, "-tp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    shared += ["--master-port", str(master), "--distributed-executor-backend", "mp"]
    roles = (["--node-rank", "0", "--port", str(port)], ["--node-rank", "1", "--headless"])
    servers = [
        Server([*shared, *role], logs / f"{rank}.log", **extra[rank])
        for rank, role in enumerate(roles)
    ]
    statuses = outcome(servers, port)
    assert all(status != 0 for status in statuses), statuses
    return [server.output for server in servers]


def test_truncated_shard(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["full"], folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-64])
    assert f"{shard.name}: the shard has" in alone(folder, tmp_path / "log")


def test_non_finite_scale(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["full"], folder)
    name = "model.language_model.layers.1.mlp.experts.6.down_proj.svh"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"][name]
    tensors = load_file(shard)
    tensors[name][7] = torch.inf
    save_file(tensors, shard, {"format": "pt"})
    assert f"{shard.name}: {name}: 1 of" in alone(folder, tmp_path / "log")


@pytest.mark.long
def test_ranks_with_different_digests(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    salt = {"GLM_EXL3_DIGEST_SALT": "other"}
    for output in nodes(checkpoints["full"], tmp_path, {}, salt):
        assert "salt: absent / other" in output


def test_plugin_absent_on_one_rank(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    bounded = {"GLM_EXL3_JOIN_TIMEOUT_S": "30"}
    absent = {"VLLM_PLUGINS": "glm_exl3_cpu"}
    head, worker = nodes(checkpoints["full"], tmp_path, bounded, absent)
    assert "Unknown quantization method: exl3" in worker
    assert "rank 1 of 2 did not answer within 30 s" in head
