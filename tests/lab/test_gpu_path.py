"""DEVICE=cuda on nodes that only pretend to have a GPU: what docker is asked for, and when."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from lab import Node

SMI = """#!/bin/sh
case "$*" in *--query-gpu=*) echo "0, NVIDIA GB10, GPU-0, [N/A], 580.95.05, 12.1" ;; esac
"""


@pytest.fixture
def gpus(lab) -> Iterator[None]:
    path = "/usr/local/bin/nvidia-smi"
    for node in lab.nodes:
        script = f"cat > {path} && chmod 755 {path}; rm -rf /lab/asked"
        assert node.shell.run(["sh", "-c", script], stdin=SMI).ok
    yield
    for node in lab.nodes:
        node.shell.run(["rm", path])


def asked(node: Node) -> list[dict]:
    """The runtime configuration of every container of this node, in the order they were made."""
    files = sorted((node.work / "lab" / "asked").glob("*.json"), key=lambda p: p.stat().st_mtime)
    return [json.loads(path.read_text()) for path in files]


def test_the_self_check_and_every_rank_get_the_gpus(gpus, head, lab) -> None:
    done = head.run("start", DEVICE="cuda", GPUS_PER_NODE="1")
    assert done.code == 0, done.out + done.err
    first, second = (asked(node) for node in lab.nodes)
    assert [config["process"]["args"][1:3] for config in first] == [
        ["-m", "glm_exl3.doctor"], ["/opt/glm-exl3/entrypoint.py", "vllm"],
    ]  # fmt: skip
    assert len(second) == 1
    for config in (*first, *second):
        assert "NVIDIA_VISIBLE_DEVICES=all" in config["process"]["env"]
        assert config["hooks"]["prestart"][0]["path"].endswith("nvidia-container-runtime-hook")
        assert "CAP_SYS_ADMIN" not in config["process"]["capabilities"]["bounding"]
        assert not any("infiniband" in mount["destination"] for mount in config["mounts"])


def test_an_image_that_fails_on_the_gpu_reaches_no_other_node(gpus, head, lab) -> None:
    done = head.run("start", DEVICE="cuda", GPUS_PER_NODE="1", IMAGE="glm-exl3:sick")
    assert done.code == 3
    assert "planted-sickness" in done.out + done.err
    assert len(asked(lab.nodes[0])) == 1 and asked(lab.nodes[1]) == []


def test_a_node_without_a_gpu_is_refused_before_anything_runs(head, lab) -> None:
    done = head.run("start", DEVICE="cuda", GPUS_PER_NODE="1")
    assert done.code == 3
    for name in ("node1", "node2"):
        assert f"{name}: 0 GPU(s) visible, 1 needed" in done.out + done.err
