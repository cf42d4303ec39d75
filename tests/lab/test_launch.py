"""Launch, rollback and stop over two real docker daemons and a real ssh server."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import httpx
import pytest
from lab import IMAGE

from glm_launch import health
from glm_launch.errors import InterruptedLaunchError, LaunchFailedError


def nothing_left(lab) -> bool:
    return all(not node.containers() for node in lab.nodes)


def listening(node) -> set[int]:
    rows = node.shell.run(["ss", "-Hltn"]).out.splitlines()
    return {int(row.split()[3].rpartition(":")[2]) for row in rows}


def test_start_answer_observe_stop(fakes, lab) -> None:
    cluster = fakes.launch()
    answer = health.complete("http://127.0.0.1:8888", "fake", None, 10)
    assert answer and answer.startswith("lab")
    states = cluster.observe()
    assert [(state.node, state.state) for state in states] == [
        ("node1", "running"), ("node2", "running"),
    ]  # fmt: skip
    assert cluster.stop() is True
    assert nothing_left(lab)
    assert not listening(lab.nodes[0]) & {8888, 29521, 29522}
    assert cluster.stop() is False


def test_the_containers_ask_for_what_they_should(fakes, lab) -> None:
    fakes.launch()
    (asked,) = sorted(
        (lab.nodes[1].work / "lab" / "asked").glob("*.json"), key=lambda path: path.stat().st_mtime
    )[-1:]
    config = json.loads(asked.read_text())
    limits = {one["type"]: one["soft"] for one in config["process"]["rlimits"]}
    assert limits["RLIMIT_MEMLOCK"] == 2**64 - 1
    assert config["process"]["noNewPrivileges"] is True
    assert "CAP_SYS_ADMIN" not in config["process"]["capabilities"]["bounding"]


def test_a_rank_that_fails_at_start_rolls_everything_back(fakes, lab) -> None:
    fakes.env[1] = {"FAKE_TROUBLE": "crash-at-start"}
    with pytest.raises(LaunchFailedError) as caught:
        fakes.launch()
    seen = caught.value.findings[0].seen
    assert "rank 1 (worker) exited with exit code 70" in seen
    assert "planted failure" in seen
    assert nothing_left(lab)


def test_f12_nodes_that_differ_end_with_78_and_name_the_field(fakes, lab) -> None:
    fakes.extra[1] = ("--max-model-len", "8192")
    with pytest.raises(LaunchFailedError) as caught:
        fakes.launch()
    log = next(fakes.folder.glob("launches/*/rank1.log")).read_text()
    assert "exit code 78" in str(caught.value)
    assert "arguments --max-model-len differs: node node1 (rank 0) has absent" in log
    assert nothing_left(lab)


def test_f19_a_plugin_that_does_not_load_ends_the_launch(fakes, lab) -> None:
    fakes.env[1] = {"PYTHONPATH": "/opt/broken"}
    with pytest.raises(LaunchFailedError) as caught:
        fakes.launch()
    assert "rank 1 (worker)" in str(caught.value)
    assert "planted import failure" in str(caught.value)
    log = next(fakes.folder.glob("launches/*/rank1.log")).read_text()
    assert "the plugin does not load" in log
    assert nothing_left(lab)


def test_ctrl_c_before_ready_rolls_back(fakes, lab) -> None:
    fakes.extra = {0: ("--nnodes", "3"), 1: ("--nnodes", "3")}
    timer = threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(InterruptedLaunchError):
        fakes.launch()
    assert nothing_left(lab)


def test_a_dead_worker_is_seen_although_the_head_says_it_is_healthy(fakes, lab) -> None:
    cluster = fakes.launch()
    lab.nodes[1].shell.run(["docker", "kill", "--signal", "KILL", "glm-exl3-node1"])
    begin = time.monotonic()
    while cluster.observe()[1].state == "running":
        assert time.monotonic() - begin < 5
    worker = cluster.observe()[1]
    assert (worker.state, worker.exit_code) == ("exited", 137)
    assert httpx.get("http://127.0.0.1:8888/health").status_code == 200


def test_f13_a_stopped_container_of_ours_is_replaced(fakes, lab) -> None:
    first = fakes.launch()
    for node in lab.nodes:
        node.shell.run(["docker", "kill", *node.containers()])
    first.store.forget()
    fakes.launch()
    assert len(lab.nodes[0].containers()) == len(lab.nodes[1].containers()) == 1


def test_f13_a_running_container_of_the_same_name_is_left_alone(fakes, lab) -> None:
    worker = lab.nodes[1].shell
    worker.run(["docker", "run", "-d", "--name", "glm-exl3-node1", "--network", "host",
                "--entrypoint", "sleep", "glm-exl3:lab", "600"])  # fmt: skip
    with pytest.raises(LaunchFailedError, match="already there and is not stopped"):
        fakes.launch()
    assert worker.run(["docker", "ps", "-q"]).out.strip()
    assert nothing_left(lab)


def test_the_key_is_in_no_argument_label_inspection_or_log(fakes, lab) -> None:
    fakes.key = "planted-secret-key"
    cluster = fakes.launch()
    assert httpx.get("http://127.0.0.1:8888/v1/models").status_code == 401
    seen = [node.shell.run(["docker", "inspect", *node.containers()]).out for node in lab.nodes]
    seen += [node.shell.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"]).out for node in lab.nodes]
    seen += [path.read_text() for path in fakes.folder.rglob("*") if path.is_file()]
    assert len(seen) > 4 and not any(fakes.key in text for text in seen)
    path = "/run/glm-exl3/glm-exl3-node0.key"
    head = lab.nodes[0].shell
    assert head.run(["stat", "-c", "%a", path]).out.strip() == "600"
    cluster.stop()
    assert not head.run(["test", "-e", path]).ok


def test_a_node_that_lost_power_is_lost_and_comes_back_clean(fakes, lab) -> None:
    cluster = fakes.launch()
    node = lab.nodes[1]
    node.power_off()
    try:
        time.sleep(1.1)
        assert cluster.observe()[1].state == "lost"
    finally:
        node.power_on()
        node.wait_up()
    cluster.stop()
    assert nothing_left(lab)


def test_what_the_tests_process_preloads_stays_outside_of_a_node(lab, monkeypatch) -> None:
    node = lab.nodes[1]
    node.power_off()
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", "/nowhere/libgomp.so")
        node.power_on()
    node.wait_up()
    done = node.shell.run(["docker", "run", "--rm", "--entrypoint", "sleep", IMAGE, "0"])
    assert (done.code, done.err) == (0, "")
