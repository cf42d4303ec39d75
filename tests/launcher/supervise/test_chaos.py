"""Seeded faults and start/stop cycles over fake ranks of this machine break no invariant.

The same over nodes and networks, and many more: tests/lab/chaos.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from staged import Service, canaries

from glm_launch import procs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RETURN_S = 90.0
ANSWER_S = 30.0
SECRET = "planted-chaos-key"
ENGINE_DOES = {"engine exits 0": "exit", "engine stalls": "stall", "engine crashes": "crash"}
SIGNALS = {
    "kill head": (0, signal.SIGKILL), "kill worker": (1, signal.SIGKILL),
    "freeze head": (0, signal.SIGSTOP), "freeze worker": (1, signal.SIGSTOP),
}  # fmt: skip
KINDS = (*ENGINE_DOES, *SIGNALS, "kill supervisor")


def cause(service: Service, kind: str) -> None:
    if kind in SIGNALS:
        rank, number = SIGNALS[kind]
        os.kill(service.pids()[rank], number)
    elif kind in ENGINE_DOES:
        service.post("/fake", {"do": ENGINE_DOES[kind]})
    else:
        service.supervisors[-1].kill()
        service.supervisors[-1].wait()
        service.supervise(max_restarts=100)


class Client(threading.Thread):
    """Asks all the time; each request gets an answer or an error in time."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self.service, self.done = service, threading.Event()
        self.answers, self.slowest_s = 0, 0.0

    def run(self) -> None:
        while not self.done.wait(0.2):
            begin = time.monotonic()
            self.answers += answered(self.service)
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin)


def answered(service: Service) -> bool:
    url = f"http://127.0.0.1:{service.launcher.env['PORT']}/v1/completions"
    headers = {"Authorization": f"Bearer {SECRET}"}
    try:
        reply = httpx.post(url, json={"prompt": "x"}, headers=headers, timeout=ANSWER_S)
    except httpx.HTTPError:
        return False
    return reply.status_code == 200


def whole(service: Service, since: float) -> bool:
    """Watched, answering, and not only until the fault shows."""
    good = service.watching() and service.generation is not None and answered(service)
    return good and time.monotonic() - since > 1.5


def generations(service: Service) -> set[str]:
    """Launches of which a process lives."""
    found = set()
    for path in service.store.launches.glob("*/rank?.json"):
        leader = leaders_of(path)
        if leader is not None and procs.session_members(leader):
            found.add(path.parent.name)
    return found


def leaders_of(record: Path) -> procs.Identity | None:
    try:
        return procs.Identity(**json.loads(record.read_text())["leader"])
    except (OSError, ValueError, KeyError):
        return None


def listening(ports: set[int]) -> set[int]:
    """Which of the ports somebody listens at."""
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [row.split() for row in rows]
    return {int(f[1].rpartition(":")[2], 16) for f in fields if f[3] == "0A"} & ports


def left_over(service: Service) -> list[str]:
    """What a stop left."""
    env, found = service.launcher.env, []
    if pids := service.launcher.left_over():
        found.append(f"processes {pids}")
    if ports := listening({int(env["PORT"]), int(env["MASTER_PORT"])}):
        found.append(f"ports {ports}")
    if service.store.is_locked() or service.desk.is_held():
        found.append("a lock")
    return found


@pytest.fixture
def secret(service) -> Iterator[Service]:
    service.launcher.env["VLLM_API_KEY"] = SECRET
    yield service
    texts = [path.read_text(errors="replace") for path in service.launcher.state.rglob("*")
             if path.is_file()]  # fmt: skip
    assert texts and not any(SECRET in text for text in texts)


def test_ten_random_faults_break_no_invariant(
    secret: Service, wait_for: Callable[..., None]
) -> None:
    secret.start()
    secret.supervise(max_restarts=100)
    wait_for(secret.watching)
    client = Client(secret)
    client.start()
    generator = random.Random(6)
    for _ in range(10):
        kind, begin = generator.choice(KINDS), time.monotonic()
        cause(secret, kind)
        wait_for(lambda begin=begin: whole(secret, begin), RETURN_S)
        assert generations(secret) == {secret.generation}, kind
    client.done.set()
    client.join(ANSWER_S + 5)
    assert not client.is_alive() and client.slowest_s < ANSWER_S and client.answers
    assert secret.desk.dismiss()
    assert secret.launcher("stop").returncode == 0
    wait_for(lambda: left_over(secret) == [])


def test_three_cycles_leave_nothing(service: Service, wait_for: Callable[..., None]) -> None:
    def here() -> tuple[int, int]:
        return len(list(Path("/dev/shm").iterdir())), len(list(Path("/proc/self/fd").iterdir()))

    before = here()
    for _ in range(3):
        done = service.launcher("start", SUPERVISE="1")
        assert done.returncode == 0 and "supervised by process" in done.stdout
        assert service.launcher("stop").returncode == 0
        assert left_over(service) == []
        wait_for(lambda: canaries(service.launcher.state) == [])
    assert here() == before
