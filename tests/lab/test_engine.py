"""The real engine in the CPU image over two nodes, tensor parallel, through `./start.sh`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import engine_lab
import httpx
import lab as lab_module
import pytest
from head import STATE, Head

from glm_launch.errors import LaunchFailedError
from glm_launch.lifecycle import Cluster
from glm_launch.nodes.runner import ContainerRunner
from glm_launch.plan import LaunchPlan
from glm_launch.state import StateStore

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
START_S = 900.0


@pytest.fixture(scope="module")
def head(tiny_model) -> Iterator[Head]:
    if not (lab_module.ROOTFS.is_dir() and lab_module.BASE.is_file()):
        pytest.fail("the lab is not set up: run tests/lab/setup.sh --engine")
    with engine_lab.opened(tiny_model) as head:
        engine_lab.build(head)
        yield head


def start(head: Head) -> str:
    done = head.run("start", timeout_s=START_S)
    assert done.code == 0, done.out + done.err
    return done.out


def files(head: Head) -> str:
    """Inode and change time of every file of the weights on the worker."""
    command = ["sh", "-c", f"cd {head.settings['MODEL']} && stat -c '%n %i %Z' *"]
    return head.lab.nodes[1].shell.run(command).out


def test_the_image_holds_a_plugin_that_passes_its_self_check(head) -> None:
    run = ["docker", "run", "--rm", "--network", "none", "--entrypoint", "python3"]
    command = [*run, engine_lab.IMAGE, "-m", "glm_exl3.doctor", "--json"]
    done = head.node.shell.run(command, timeout_s=120)
    found = {one["name"]: one for one in json.loads(done.out)}
    assert done.ok and all(one["ok"] for one in found.values())
    assert found["back end"]["detail"] == "reference on cpu"
    assert not head.lab.nodes[1].shell.run(["docker", "image", "inspect", engine_lab.IMAGE]).ok


def test_from_nothing_to_an_answer_and_a_second_start_sends_nothing(head) -> None:
    before = head.sent_bytes()
    said = start(head)
    first = head.sent_bytes() - before
    assert f"sending {engine_lab.IMAGE} to node2" in said and "READY" in said
    body = {"model": "GLM-5.3-Flash-EXL3", "max_tokens": 8, "temperature": 0,
            "messages": [{"role": "user", "content": "Hello"}]}  # fmt: skip
    reply = httpx.post("http://127.0.0.1:8888/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] > 0
    ranks = json.loads(head.run("status", "--json").out)["ranks"]
    assert [(rank["node"], rank["state"]) for rank in ranks] == [
        ("node1", "running"), ("node2", "running"),
    ]  # fmt: skip
    assert head.run("stop").code == 0
    assert all(not node.containers() for node in head.lab.nodes)

    there, before = files(head), head.sent_bytes()
    said = start(head)
    again = head.sent_bytes() - before
    assert "sending" not in said and "copying" not in said and files(head) == there
    assert first > 3e9 and again < 50e6, (first, again)


def test_another_plugin_is_refused_before_the_engine_starts(head, tmp_path) -> None:
    text = head.node.shell.run(
        ["sh", "-c", f"cat $(ls -t {STATE}/launches/*/plan.json | head -n 1)"]
    )
    plan = LaunchPlan.from_json(json.loads(text.out))
    assert head.run("stop").code == 0
    salted = (*plan.ranks[1].env, ("GLM_EXL3_DIGEST_SALT", "other"))
    plan = replace(plan, ranks=(plan.ranks[0], replace(plan.ranks[1], env=salted)))
    store = StateStore(tmp_path / "state")
    shells = {"node1": head.node.shell, "node2": head.lab.nodes[1].ssh}
    cluster = Cluster(store, ContainerRunner(store.launches, shells, {}))
    with pytest.raises(LaunchFailedError) as caught:
        cluster.launch(plan, {}, lambda _name, _seconds: None)
    assert "exit code 78" in str(caught.value)
    log = next(store.launches.glob("*/rank1.log")).read_text()
    assert "plugin differs" in log and "salt=other" in log
    assert "Initializing a V1 LLM engine" not in log
    assert all(not node.containers() for node in head.lab.nodes)
