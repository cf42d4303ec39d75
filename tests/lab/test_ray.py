"""`EXECUTOR=ray` with the real engine over two nodes: verbs, equal answers, faults, joining.

Minutes each. What was measured is printed (`-s`) and stands in results.json under `stayup`, `ray`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import lab as lab_module
import pytest
import thin_image
from head import STATE, Head
from lab import Node

from equivalence import Line, compare

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1500)]
START_S = 1200.0
IMAGE = thin_image.NAME
API = "http://127.0.0.1:8888/v1/completions"
PROMPTS = [[70 + 13 * n + (7 * k) % 900 for k in range(4 + 30 * n)] for n in range(4)]
TOKENS = 24
RAY_PORT, USERS_PORT = 29530, 6379
USERS = "users-ray"
TOLD_S = 15.0
PROCESSES = "raylet|gcs_server|ray::|ray_node"


@pytest.fixture(scope="module")
def head(tiny_model) -> Iterator[Head]:
    if not (lab_module.ROOTFS.is_dir() and lab_module.BASE.is_file()):
        pytest.fail("the lab is not set up: run tests/lab/setup.sh --engine")
    thin_image.install_ray()  # from outside of the lab, which has no way to a package index
    folder = Path(f"/tmp/glmlabr{os.getpid()}")
    with lab_module.opened(folder, 2) as lab, lab_module.at(lab.nodes[0]):
        first, second = lab.nodes
        head = Head(lab, {
            "RUNTIME": "containers", "DEVICE": "cpu", "IMAGE": IMAGE, "HEAD_IP": first.fabric,
            "WORKER_IP": second.fabric, "WORKER_SSH": second.name, "MODEL": str(tiny_model),
            "SPEC_METHOD": "none", "MAX_MODEL_LEN": "1024", "CPU_KV_GIB": "1", "EXECUTOR": "ray",
            "LANGUAGE_MODEL_ONLY": "1", "SKIP_OVERLAY_VERIFY": "1",
        })  # fmt: skip
        head.move_in()
        first.bring_in(tiny_model)
        thin_image.load(lab)
        yield head
        head.run("stop")


def start(head: Head, **settings: str) -> float:
    """Seconds to READY."""
    begin = time.monotonic()
    done = head.run("start", timeout_s=START_S, **settings)
    assert done.code == 0, done.out[-3000:] + done.err[-3000:]
    return time.monotonic() - begin


def generate(prompts, lengths) -> list[Line]:
    lines = []
    for prompt, length in zip(prompts, lengths, strict=True):
        body = {"model": "GLM-5.3-Flash-EXL3", "prompt": list(prompt), "max_tokens": length,
                "temperature": 0, "ignore_eos": True, "logprobs": 2,
                "return_token_ids": True}  # fmt: skip
        reply = httpx.post(API, json=body, timeout=300)
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        tops = [sorted(one.values(), reverse=True) for one in choice["logprobs"]["top_logprobs"]]
        lines.append(Line(
            tokens=tuple(choice["token_ids"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            margins=tuple(top[0] - top[1] for top in tops),
        ))  # fmt: skip
    return lines


def pids(node: Node, pattern: str) -> list[int]:
    """Processes of a node by what they call themselves, in its own numbers."""
    found = node.shell.run(["pgrep", "-f", pattern]).out.split()
    return [int(one) for one in found]


def left(head: Head) -> dict[str, list[str]]:
    """What a stopped launch must not leave on a node."""
    found: dict[str, list[str]] = {}
    for node in head.lab.nodes:
        ports = node.shell.run(["sh", "-c", "ss -Hltn | awk '{print $4}'"]).out.split()
        block = range(RAY_PORT, RAY_PORT + 64)
        busy = [one for one in ports if int(one.rpartition(":")[2]) in block]
        shm = node.shell.run(["ls", "/dev/shm"]).out.split()
        sessions = node.shell.run(["ls", "/tmp/ray"]).out.split()
        ours = [str(pid) for pid in pids(node, PROCESSES)]
        found[node.name] = [*node.containers(), *busy, *shm, *sessions, *ours]
    return found


def said(head: Head) -> str:
    return head.node.shell.run(["cat", f"{STATE}/supervisor/log"]).out


def until(what: Callable[[], bool], timeout_s: float, words: Callable[[], str]) -> float:
    begin = time.monotonic()
    while not what():
        assert time.monotonic() - begin < timeout_s, f"not within {timeout_s} s\n{words()}"
        time.sleep(0.2)
    return time.monotonic() - begin


def status(head: Head) -> dict:
    return json.loads(head.run("status", "--json").out)


def note(**values: object) -> None:
    print(json.dumps(values), flush=True)


def test_what_does_not_go_with_ray_exits_2(head) -> None:
    for settings in ({"RAY_ADDRESS": "ray://10.77.1.1:10001"},
                     {"EXECUTOR": "mp", "RAY_ADDRESS": "10.77.1.1:6379"},
                     {"RUNTIME": "local", "WORKER_IP": ""}):  # fmt: skip
        done = head.run("start", **settings)
        assert done.code == 2 and "RAY" in (done.out + done.err).upper(), done


@pytest.fixture(scope="module")
def supervised(head) -> Iterator[Head]:
    note(ray_start_s=round(start(head, SUPERVISE="1")))
    yield head
    assert head.run("stop", SUPERVISE="1").code == 0
    assert left(head) == {"node1": [], "node2": []}


@pytest.fixture(scope="module")
def answers(supervised) -> list[Line]:
    """What the engine says over Ray."""
    return generate(PROMPTS, [TOKENS] * len(PROMPTS))


def test_one_rank_runs_on_each_node_and_the_verbs_see_both(supervised, answers) -> None:
    head = supervised
    assert [len(line.tokens) for line in answers] == [TOKENS] * len(PROMPTS)
    logs = head.run("logs", "head", "-n", "4000").out
    assert logs.count("of 2: plugin=") == 2
    ips = set(re.findall(r"RayWorkerProc pid=\d+, ip=([\d.]+)", logs))
    assert ips == {head.lab.nodes[1].fabric}, "the other rank is on the driver's own node"
    ranks = status(head)["ranks"]
    assert [(rank["node"], rank["state"]) for rank in ranks] == [
        ("node1", "running"), ("node2", "running"),
    ]  # fmt: skip
    assert "Ray runtime started" in head.run("logs", "worker").out


@pytest.mark.parametrize(
    ("what", "number", "pattern"),
    [
        ("a rank of the worker", 1, "ray::RayWorkerProc"),
        ("Ray of the worker", 1, "raylet/raylet"),
        ("Ray's head", 0, "gcs/gcs_server"),
    ],
)
def test_a_killed_part_of_ray_is_noticed_and_all_restart(supervised, what, number, pattern) -> None:
    head = supervised
    before, seen = status(head)["generation"], len(said(head))
    assert head.lab.nodes[number].shell.run(["pkill", "-KILL", "-f", pattern]).ok
    begin = time.monotonic()
    told = until(lambda: "error [" in said(head)[seen:], 60, lambda: said(head))
    until(lambda: "[recovered]" in said(head)[seen:], START_S, lambda: said(head))
    back = time.monotonic() - begin
    note(killed=what, told_s=round(told, 1), back_s=round(back))
    assert status(head)["generation"] != before
    assert all(len(node.containers()) == 1 for node in head.lab.nodes)
    assert generate(PROMPTS[:1], [4])[0].tokens
    assert told <= TOLD_S


def test_mp_gives_the_same_answers(head, answers) -> None:
    head.run("stop", SUPERVISE="1")
    note(mp_start_s=round(start(head, EXECUTOR="mp")))
    result = compare(PROMPTS, answers, generate)
    note(positions=result.positions, ties=result.ties)
    assert head.run("stop").code == 0
    assert result.broken == [], result.broken


@pytest.fixture
def cluster(head) -> Iterator[str]:
    """A Ray cluster of somebody else, with its head on the first node; its address."""
    node = head.lab.nodes[0]
    head.run("stop")
    argv = ["docker", "run", "--detach", "--name", USERS, "--network", "host", "--ipc",
            "shareable", "--volume", "/tmp/ray", "--entrypoint", "ray", IMAGE, "start", "--head",
            "--block", "--port", str(USERS_PORT), "--node-ip-address", node.fabric, "--num-gpus",
            "4", "--num-cpus", "1", "--include-dashboard", "false",
            "--object-store-memory", "80000000"]  # fmt: skip
    done = node.shell.run(argv)
    assert done.ok, done.err
    started = ["docker", "logs", USERS]
    until(lambda: "Ray runtime started" in str(node.shell.run(started)), 120,
          lambda: str(node.shell.run(started)))  # fmt: skip
    yield f"{node.fabric}:{USERS_PORT}"
    node.shell.run(["docker", "rm", "--force", "--volumes", USERS])


def nodes_of(head: Head, address: str) -> tuple[int, int]:
    """How many nodes the users' cluster has, and what a task there answers.

    A container beside the cluster's asks: without pivot_root, as in the lab, `docker exec` sees the
    node's files.
    """
    code = (
        "import ray, sys\n"
        f"ray.init(address='{address}', logging_level='ERROR', log_to_driver=False)\n"
        "task = ray.remote(num_cpus=1, resources={'node:' + sys.argv[1]: 0.01})(lambda: 42)\n"
        "print(sum(one['Alive'] for one in ray.nodes()), ray.get(task.remote()))"
    )
    ip = address.rpartition(":")[0]
    there = f"container:{USERS}"
    beside = ["--network", "host", "--ipc", there, "--pid", there, "--volumes-from", USERS]
    command = ["docker", "run", "--rm", *beside, "--entrypoint", "python3", IMAGE, "-c", code, ip]
    done = head.lab.nodes[0].shell.run(command, timeout_s=120)
    assert done.ok, done.err
    alive, answer = done.out.split()[-2:]
    return int(alive), int(answer)


def test_a_cluster_that_was_joined_outlives_the_launch(head, answers, cluster) -> None:
    note(joined_start_s=round(start(head, RAY_ADDRESS=cluster)))
    result = compare(PROMPTS[:2], answers[:2], generate)
    assert result.broken == [], result.broken
    assert nodes_of(head, cluster) == (3, 42)
    ips = re.findall(r"RayWorkerProc pid=\d+, ip=([\d.]+)", head.run("logs", "head").out)
    assert set(ips) == {head.lab.nodes[1].fabric}
    assert head.run("stop").code == 0
    assert nodes_of(head, cluster) == (1, 42)
    assert all(not node.containers() for node in head.lab.nodes)
