"""Ranks compare their digests before weights are read, and none of them hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.quant.startup import Digest, check_equal

RANK = """
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
import torch.distributed as dist
from glm_exl3.quant import startup
rank, ranks, store, value, joins = sys.argv[1:]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks)
)
startup.set_digest(startup.Digest((("plugin", "1"), ("kernels", value))))
group = SimpleNamespace(
    world_size=int(ranks), rank_in_group=int(rank), cpu_group=dist.group.WORLD
)
if joins == "yes":
    startup.compare_digests(group)
    # Nobody closes connections that the other still uses, nor waits for gloo's threads at exit.
    Path(f"{store}.{rank}").touch()
    until = time.monotonic() + 20
    while not all(Path(f"{store}.{one}").exists() for one in range(int(ranks))):
        assert time.monotonic() < until
        time.sleep(0.01)
os._exit(0)
"""


def run(tmp_path: Path, values: list[str], joins: list[str]) -> list[tuple[int, str]]:
    store = str(tmp_path / "store")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(len(values)), store, value, joined],
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": "", "GLM_EXL3_JOIN_TIMEOUT_S": "3", "OMP_NUM_THREADS": "1"},
        )
        for rank, (value, joined) in enumerate(zip(values, joins, strict=True))
    ]
    results = []
    for process in processes:
        errors = process.communicate(timeout=60)[1]
        results.append((process.returncode, errors))
    return results


def test_equal_digests_pass() -> None:
    check_equal([Digest((("a", "1"),))] * 3)


def test_differences_name_rank_and_entry() -> None:
    digests = [Digest((("a", "1"), ("b", "2"))), Digest((("a", "1"), ("b", "3")))]
    with pytest.raises(GlmExl3Error, match="rank 1: b: 2 / 3"):
        check_equal(digests)


@pytest.mark.slow
def test_two_equal_processes_pass(tmp_path: Path) -> None:
    assert [code for code, _ in run(tmp_path, ["k", "k"], ["yes", "yes"])] == [0, 0]


@pytest.mark.slow
def test_two_different_processes_both_stop_with_the_reason(tmp_path: Path) -> None:
    for code, errors in run(tmp_path, ["k", "other"], ["yes", "yes"]):
        assert code != 0
        assert "rank 1: kernels: k / other" in errors


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_compares_stops_the_other_in_time(tmp_path: Path, absent: int) -> None:
    joins = ["yes", "yes"]
    joins[absent] = "no"
    code, errors = run(tmp_path, ["k", "k"], joins)[1 - absent]
    assert code != 0
    assert "not all 2 ranks reached the comparison" in errors
