"""The roll call over several nodes: who is missing or different is named, in time."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

RANK = """
import sys
from glm_exl3.quant import startup
from glm_exl3.quant.rollcall import Meeting, call
port, rank, ranks, value = sys.argv[1:]
startup.set_digest(startup.Digest((("plugin", "1"), ("kernels", value))))
call(Meeting("127.0.0.1", int(port), int(rank), int(ranks)))
import torch.distributed as dist
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(ranks)
)
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(ranks: int, values: dict[int, str], timeout_s: int = 30) -> dict[int, tuple[int, str]]:
    port = str(free_port())
    environment = {"GLM_EXL3_JOIN_TIMEOUT_S": str(timeout_s), "OMP_NUM_THREADS": "1"}
    processes = {
        rank: subprocess.Popen(
            [sys.executable, "-c", RANK, port, str(rank), str(ranks), value],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank, value in values.items()
    }
    results = {}
    for rank, process in processes.items():
        errors = process.communicate(timeout=90)[1]
        results[rank] = (process.returncode, errors)
    return results


@pytest.mark.slow
def test_all_present_and_equal_and_the_rendezvous_behind_it_works() -> None:
    found = run(2, {0: "k", 1: "k"})
    assert [code for code, _ in found.values()] == [0, 0], found


@pytest.mark.slow
def test_a_different_rank_stops_all_at_once() -> None:
    started = time.monotonic()
    for code, errors in run(2, {0: "k", 1: "other"}).values():
        assert code != 0
        assert "rank 1: kernels: k / other" in errors
    assert time.monotonic() - started < 25


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named() -> None:
    code, errors = run(3, {0: "k"}, timeout_s=1)[0]
    assert code != 0
    assert "rank 1, 2 of 3 did not answer within 1 s" in errors


@pytest.mark.slow
def test_a_head_that_never_comes_is_named() -> None:
    code, errors = run(2, {1: "k"}, timeout_s=2)[1]
    assert code != 0
    assert "rank 1 cannot reach the head at 127.0.0.1" in errors


def test_only_launches_over_several_nodes_call_the_roll(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    import vllm.config

    from glm_exl3.patches.roll_call import with_roll_call
    from glm_exl3.quant import rollcall

    called: list[object] = []
    monkeypatch.setattr(rollcall, "call", called.append)
    init = with_roll_call(lambda *args: args)
    for nodes, replicas in ((1, 1), (2, 2), (2, 1)):
        parallel = SimpleNamespace(
            nnodes=nodes, data_parallel_size=replicas, master_addr="head", master_port=5
        )
        config = SimpleNamespace(parallel_config=parallel)
        monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda c=config: c)
        assert init(2, 1, "tcp://x") == (2, 1, "tcp://x")
    assert called == [rollcall.Meeting("head", 5, 1, 2)]
