"""`./start.sh` on the head of two nodes, with fake ranks: what a user runs and what that leaves."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from head import STATE, Head
from lab import HOME, IMAGE, ROOT, wait_for


def containers(head: Head) -> list[list[str]]:
    return [node.containers() for node in head.lab.nodes]


def counted(head: Head, work: Callable[[], object]) -> int:
    before = head.sent_bytes()
    work()
    return head.sent_bytes() - before


def good(done) -> None:
    assert done.code == 0, done.out + done.err


def test_a_second_start_sends_nothing_again(head, lab) -> None:
    for node in lab.nodes:
        node.shell.run(["docker", "rmi", "glm-exl3:fresh"])
    fresh = {"IMAGE": "glm-exl3:fresh"}
    head.node.load(name="glm-exl3:fresh", ENV=f"WHEN={time.time()}")
    first = counted(head, lambda: good(head.run("start", **fresh)))
    answer = httpx.post(
        "http://127.0.0.1:8888/v1/completions", json={"model": "x", "prompt": "a", "max_tokens": 2}
    )
    assert answer.json()["choices"][0]["text"] == "lab lab "
    assert head.run("status").code == 0
    good(head.run("stop"))
    assert containers(head) == [[], []]
    again = counted(head, lambda: good(head.run("start", **fresh)))
    assert first > 60e6 and again < first / 50, (first, again)


def test_everything_that_speaks_against_it_is_said_at_once_and_nothing_is_touched(
    head, lab
) -> None:
    worker = lab.nodes[1].shell
    label = ["--label", "io.glm-exl3.project=glm-exl3", "--label", "io.glm-exl3.owner=eve@there"]
    worker.run(["docker", "run", "-d", "--name", "hers", "--network", "host", *label,
                "--entrypoint", "sleep", IMAGE, "60"])  # fmt: skip
    assert worker.run(["ip", "link", "set", "enp1s0f1np1", "mtu", "1500"]).ok
    program = "import socket, time; s = socket.create_server(('', 29521)); time.sleep(60)"
    holder = subprocess.Popen(head.node.shell.argv(["python3", "-c", program]))
    try:
        wait_for("no listener", lambda: "29521" in head.node.shell.run(["ss", "-Hltn"]).out, 10)
        done = head.run("start", IMAGE="glm-exl3:crash")
    finally:
        head.node.shell.run(["pkill", "-f", "create_server"])
        holder.wait(10)
        worker.run(["ip", "link", "set", "enp1s0f1np1", "mtu", "9000"])
    text = done.out + done.err
    assert done.code == 3, text
    for said in ("MASTER_PORT=29521", "hers of eve@there", "enp1s0f1np1 1500"):
        assert said in text
    assert not worker.run(["docker", "image", "inspect", "glm-exl3:crash"]).ok
    assert not worker.run(["test", "-e", head.settings["MODEL"]]).ok


def test_a_failed_launch_is_exit_4_and_leaves_nothing(head) -> None:
    done = head.run("start", IMAGE="glm-exl3:crash")
    assert done.code == 4, done.out + done.err
    assert "planted failure" in done.out + done.err
    assert containers(head) == [[], []]


def test_f17_a_second_operator_is_refused_and_ctrl_c_takes_the_first_one_back(head, lab) -> None:
    first = head.popen("start", IMAGE="glm-exl3:hang")
    wait_for("no containers", lambda: all(containers(head)), 60)
    other = head.run("start", XDG_STATE_HOME=f"{HOME}/.local/other")
    assert other.code == 3
    assert re.search(r"node2 is being changed by root@node1 \(`start` since", other.out + other.err)
    head.ctrl_c(first)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 130, output
    assert containers(head) == [[], []]
    good(head.run("start"))


def test_f25_rollback_returns_to_the_image_that_answered(head) -> None:
    good(head.run("start"))
    good(head.run("stop"))
    assert head.run("start", IMAGE="glm-exl3:crash").code == 4
    good(head.run("rollback", IMAGE="glm-exl3:crash"))
    assert head.run("status", IMAGE="glm-exl3:crash").code == 0
    assert all(containers(head))


def test_an_image_that_fails_its_self_check_is_not_sent(head, lab) -> None:
    done = head.run("start", IMAGE="glm-exl3:sick")
    assert done.code == 3
    assert "planted-sickness" in done.out + done.err
    worker = lab.nodes[1].shell
    assert not worker.run(["docker", "image", "inspect", "glm-exl3:sick"]).ok
    good(head.run("start", IMAGE="glm-exl3:sick", SKIP_OVERLAY_VERIFY="1"))


def test_f12_another_image_on_a_worker_is_refused_where_none_may_be_sent(head, lab) -> None:
    name = "glm-exl3:skew"
    for node, label in zip(lab.nodes, ("lab", "other"), strict=True):
        node.load(name=name, LABEL=f"io.glm-exl3.plugin={label}")
    done = head.run("start", IMAGE=name, SKIP_PULL="1")
    assert done.code == 3
    assert "node2: plugin" in done.out + done.err
    good(head.run("start", IMAGE=name))


def test_f10_a_flipped_bit_on_a_worker_is_repaired_and_only_that_file_is_sent(head, lab) -> None:
    good(head.run("start"))
    good(head.run("stop"))
    worker, folder = lab.nodes[1].shell, head.settings["MODEL"]
    listing = ["sh", "-c", f"cd {folder} && stat -c '%n %i %Z' *"]
    shard = f"{folder}/model-00002-of-00005.safetensors"
    before = dict(line.split(maxsplit=1) for line in worker.run(listing).out.splitlines())
    assert worker.run(["sh", "-c", f"printf x | dd of={shard} bs=1 seek=4000000 conv=notrunc"]).ok
    refused = head.run("start", SKIP_SYNC="1")
    assert refused.code == 3 and "model-00002-of-00005" in refused.out + refused.err
    assert containers(head) == [[], []]
    good(head.run("start"))
    after = dict(line.split(maxsplit=1) for line in worker.run(listing).out.splitlines())
    assert {name for name in before if before[name] != after[name]} == {Path(shard).name}


SECRETS = {"VLLM_API_KEY": "planted-api-key", "HF_TOKEN": "planted-hub-token",
           "GHCR_TOKEN": "planted-registry-token"}  # fmt: skip


def test_planted_tokens_show_up_nowhere(head, lab) -> None:
    lines = "".join(f"{key}={value}\n" for key, value in SECRETS.items())
    head.node.shell.run(["sh", "-c", f"umask 077; cat > {ROOT}/.env"], stdin=lines)
    seen = watched(head, "start")
    assert "READY" in seen[0]
    other = {"XDG_STATE_HOME": f"{HOME}/.local/other", "PORT": "8889", "MASTER_PORT": "29621",
             "WATCH_PORT": "29622"}  # fmt: skip
    seen += watched(head, "start", IMAGE="127.0.0.1:1/glm-exl3:none", GHCR_USER="me", **other)
    assert any("127.0.0.1:1/glm-exl3:none: " in text for text in seen)
    assert httpx.get("http://127.0.0.1:8888/v1/models").status_code == 401
    for node in lab.nodes:
        seen.append(node.shell.run(["docker", "inspect", *node.containers()]).out)
        seen.append(node.shell.run(["sh", "-c", "docker logs $(docker ps -q) 2>&1"]).out)
    seen.append(head.run("doctor", "--json").out + head.run("plan").out)
    assert len(seen) > 10
    for secret in SECRETS.values():
        assert not any(secret in text for text in seen)
    folders = "/root /run /tmp /lab /var/lib/docker/containers"
    rest = f"\\( -path {ROOT} -o -name .pyenv \\) -prune -o -type f"
    look = "-exec grep -lE 'planted-(api|hub|registry)' {} +"
    find = ["sh", "-c", f"find {folders} {rest} {look}; echo searched"]
    assert lab.nodes[1].shell.run(find, timeout_s=120).out.split() == ["searched"]
    *holding, last = head.node.shell.run(find, timeout_s=120).out.split()
    assert last == "searched"
    modes = head.node.shell.run(["stat", "-c", "%a", *holding]).out.split()
    assert [Path(path).parent for path in holding] == [Path(STATE) / "keys"] and modes == ["600"]


def watched(head: Head, *verb: str, **settings: str) -> list[str]:
    """The output of a verb, and every command line on any node while it ran."""
    process = head.popen(*verb, **settings)
    lines = []
    while process.poll() is None:
        for node in head.lab.nodes:
            lines.append(node.shell.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"]).out)
    output = process.stdout.read() if process.stdout else ""
    return [output, *lines]
