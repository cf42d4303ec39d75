"""The supervisor over the real engine, head and worker at TP 2: a dead and a frozen worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from glm_launch import procs
from glm_launch.supervise.desk import Desk
from service import KEY, MODEL, ROOT, free_port

pytestmark = [pytest.mark.engine, pytest.mark.long]
STALL_S, IDLE_S, DEATH_S = 90.0, 150.0, 5.0
SLACK_S = 60.0


@dataclass
class Supervised:
    """A launch with its supervisor; every verb is a process of its own."""

    env: dict[str, str]

    def verb(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "glm_launch", *arguments]
        return subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, text=True)

    @property
    def desk(self) -> Desk:
        return Desk(Path(self.env["GLM_STATE_DIR"]))

    @property
    def said(self) -> str:
        return self.desk.log.read_text()

    def keeper(self, rank: int) -> procs.Identity:
        folder = self.desk.state / "launches" / str(self.desk.saved().generation)
        return procs.Identity(**json.loads((folder / f"rank{rank}.json").read_text())["leader"])

    def ask(self, tokens: int = 8) -> int:
        body = {"model": MODEL, "prompt": "a b", "max_tokens": tokens, "temperature": 0,
                "ignore_eos": True}  # fmt: skip
        url = f"http://127.0.0.1:{self.env['PORT']}/v1/completions"
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(url, json=body, headers=headers, timeout=300).status_code

    def wait(self, what: Callable[[], bool], timeout_s: float) -> float:
        begin = time.monotonic()
        while not what():
            assert time.monotonic() - begin < timeout_s, self.said
            time.sleep(0.1)
        return time.monotonic() - begin

    def recovered(self, before: str | None, cold_s: float) -> None:
        """Watched again under another name, no later than a cold start and a minute."""

        def watched() -> bool:
            saved = self.desk.saved()
            return saved.phase == "watching" and saved.generation != before

        self.wait(watched, cold_s + SLACK_S)
        assert self.ask() == 200


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Iterator[tuple[Supervised, float]]:
    model = tmp_path_factory.mktemp("tiny") / "model"
    making = [sys.executable, "-m", "glm_exl3.ref.tiny", "--family", "tr3", "--out", str(model)]
    subprocess.run(making, check=True)
    packages = (str(ROOT / name) for name in ("launcher", "bench", "overlay"))
    service = Supervised({
        **os.environ, "PYTHONPATH": os.pathsep.join(packages), "MODEL": str(model),
        "GLM_STATE_DIR": str(tmp_path_factory.mktemp("stay-up")), "SPEC_METHOD": "none",
        "MAX_MODEL_LEN": "2048", "LANGUAGE_MODEL_ONLY": "1", "PORT": str(free_port()),
        "MASTER_PORT": str(free_port()), "READY_TIMEOUT_S": "400", "VLLM_API_KEY": KEY,
        "STOP_GRACE_S": "5",
    })  # fmt: skip
    begin = time.monotonic()
    started = service.verb("start")
    cold_s = time.monotonic() - begin
    try:
        assert started.returncode == 0 and "supervised by process" in started.stdout, started
        yield service, cold_s
    finally:
        assert service.verb("stop").returncode == 0
    assert not service.desk.is_held()


def test_a_killed_worker_is_noticed_and_all_restart(launched) -> None:
    service, cold_s = launched
    before, seen = service.desk.saved().generation, len(service.said)
    procs.send(procs.session_members(service.keeper(1))[1:], signal.SIGKILL)
    took = service.wait(lambda: "error [rank-ended]" in service.said[seen:], DEATH_S)
    assert took <= DEATH_S
    service.recovered(before, cold_s)


def test_a_frozen_worker_is_noticed_under_traffic(launched) -> None:
    service, cold_s = launched
    before, seen = service.desk.saved().generation, len(service.said)
    failed: list[object] = []

    def ask() -> None:
        try:
            failed.append(service.ask(1500))
        except httpx.HTTPError as error:
            failed.append(error)

    client = threading.Thread(target=ask)
    client.start()
    time.sleep(3)
    procs.send(procs.session_members(service.keeper(1))[1:], signal.SIGSTOP)
    service.wait(lambda: "error [stalled]" in service.said[seen:], STALL_S)
    service.recovered(before, cold_s)
    client.join(30)
    assert len(failed) == 1 and failed[0] != 200
