"""compose/node.yaml without the launcher: each node by hand, as its own comment says."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from lab import HOME, IMAGE, ROOT, Lab, Node, wait_for

from glm_launch import health

COMPOSE = ["docker", "compose", "--env-file", f"{HOME}/node.env", "-f", f"{ROOT}/compose/node.yaml",
           "-f", f"{ROOT}/compose/cpu.yaml"]  # fmt: skip
URL = "http://127.0.0.1:8888"


@pytest.fixture
def nodes(lab, tiny_model) -> Iterator[list[Node]]:
    """Both nodes with the compose files and weights; nothing of compose is left over."""
    for node in lab.nodes:
        node.bring_in(ROOT / "compose", tiny_model)
    yield lab.nodes
    for node in lab.nodes:
        node.shell.run([*COMPOSE, "down", "--volumes", "--timeout", "1"], timeout_s=60)
        for path in (ROOT / "compose", tiny_model):
            node.shell.run(["umount", str(path)])


def up(lab: Lab, rank: int, weights: str, **more: str) -> None:
    api = "--headless" if rank else "--port 8888 --served-model-name lab"
    node, head = lab.nodes[rank], lab.nodes[0]
    env = {
        "GLM_IMAGE": IMAGE, "GLM_WEIGHTS": weights, "GLM_EXL3_NODES": "2",
        "GLM_EXL3_NODE_RANK": str(rank), "GLM_EXL3_HEAD": head.fabric, "VLLM_HOST_IP": node.fabric,
        "GLM_COMMAND": f"vllm serve /model --nnodes 2 --node-rank {rank} "
        f"--master-addr {head.fabric} {api}",
    } | more  # fmt: skip
    text = "".join(f"{key}={value}\n" for key, value in env.items())
    assert node.shell.run(["sh", "-c", f"cat > {HOME}/node.env"], stdin=text).ok
    done = node.shell.run([*COMPOSE, "up", "--detach"], timeout_s=60)
    assert done.ok, done.err


def states(node: Node) -> list[str]:
    done = node.shell.run([*COMPOSE, "ps", "--all", "--format", "{{.State}} {{.ExitCode}}"])
    return done.out.splitlines()


def test_two_nodes_by_hand_answer_and_stop_cleanly(lab, nodes, tiny_model) -> None:
    key = "planted-compose-key"
    head = nodes[0].shell
    head.run(["sh", "-c", f"umask 077; cat > {HOME}/api.key"], stdin=key)
    up(lab, 1, str(tiny_model))
    up(lab, 0, str(tiny_model), GLM_API_KEY_FILE=f"{HOME}/api.key")
    wait_for("no answer", lambda: bool(health.complete(URL, "lab", key, 10)), 60)
    assert httpx.get(f"{URL}/v1/models").status_code == 401
    assert key not in head.run(["docker", "inspect", *nodes[0].containers()]).out
    assert head.run([*COMPOSE, "stop"], timeout_s=60).ok
    assert states(nodes[0]) == ["exited 0"]


def test_a_node_whose_command_differs_ends_and_docker_leaves_it_so(lab, nodes, tiny_model) -> None:
    up(lab, 1, str(tiny_model), GLM_EXL3_MODEL_MANIFEST="other")
    up(lab, 0, str(tiny_model), GLM_EXL3_MODEL_MANIFEST="one")
    for node in nodes:
        wait_for("still runs", lambda node=node: states(node) == ["exited 78"], 60)
