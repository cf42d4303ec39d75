"""When a canary is sent, what its answer means, and what stands in health.json."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import canary
from canary import AGAIN_S, IDLE_S, Canary, Seen, Watcher

DOCKER = Path(canary.__file__).parent


def idle(steps: float) -> Seen:
    return Seen(0, 0, steps)


def test_nothing_is_asked_before_the_first_step() -> None:
    bird = Canary()
    for now in range(0, 4000, 2):
        bird.see(idle(0), now)
        assert not bird.due(idle(0), now)


def test_an_idle_engine_is_asked_every_minute() -> None:
    bird = Canary()
    bird.see(idle(1), 0)
    assert not bird.due(idle(1), IDLE_S - 1)
    assert bird.due(idle(1), IDLE_S)
    bird.asked = IDLE_S
    assert not bird.due(idle(1), IDLE_S + 2)
    bird.answered(0.2, IDLE_S + 1)
    assert not bird.due(idle(1), 2 * IDLE_S)
    assert bird.due(idle(1), 2 * IDLE_S + 1)


@pytest.mark.parametrize("busy", [Seen(1, 0, 5), Seen(0, 3, 5)])
def test_a_busy_engine_is_left_alone(busy) -> None:
    bird = Canary()
    for now in range(0, 1000, 2):
        bird.see(busy, now)
        assert not bird.due(busy, now)


def test_two_failures_come_within_the_time_to_notice() -> None:
    bird = Canary()
    bird.see(idle(9), 0)
    now, times = 0.0, []
    while len(times) < 2:
        now += canary.LOOK_S
        bird.see(idle(9), now)
        if bird.due(idle(9), now):
            bird.asked = now
            now += canary.ANSWER_S
            bird.answered(None, now)
            times.append(now)
    assert bird.failures == 2
    assert times[-1] <= 150 - 15 and times[1] - times[0] >= AGAIN_S


def test_a_failed_canary_that_hangs_as_a_request_is_followed_by_another() -> None:
    """The engine still shows it as running; that is no reason to take the engine for busy."""
    bird = Canary()
    bird.see(idle(9), 0)
    bird.asked = IDLE_S
    bird.see(Seen(1, 0, 9), IDLE_S + 2)
    bird.answered(None, IDLE_S + 30)
    bird.see(Seen(1, 0, 9), IDLE_S + 32)
    assert bird.due(Seen(1, 0, 9), IDLE_S + 36)


def test_a_step_for_somebody_else_forgives() -> None:
    bird = Canary()
    bird.see(idle(9), 0)
    bird.failures = 1
    bird.see(Seen(2, 0, 10), 100)
    assert bird.failures == 0 and not bird.due(Seen(2, 0, 10), 130)


def test_counters_are_summed_over_engines() -> None:
    text = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:iteration_tokens_total_count{engine="0"} 30.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 7.0
"""
    assert canary.parse(text) == Seen(3, 4, 30)
    assert canary.parse("vllm:num_requests_running 1\n") is None
    assert canary.parse("<html>") is None


def test_only_compilers_below_the_root_count() -> None:
    known = [(1, 0, "python"), (10, 1, "ninja"), (11, 10, "nvcc"), (12, 10, "bash"),
             (90, 80, "nvcc"), (80, 80, "sh")]  # fmt: skip
    assert canary.compilers(known, 1) == ["ninja", "nvcc"]
    assert canary.compilers(known, 10) == ["ninja", "nvcc"]
    assert canary.compilers(known, 12) == []
    assert canary.compilers(known, 12, 10) == ["ninja", "nvcc"]


def test_a_real_compiler_child_is_seen(tmp_path) -> None:
    program = tmp_path / "ptxas"
    shutil.copy2("/usr/bin/sleep", program)
    with subprocess.Popen([program, "30"]) as child:
        assert "ptxas" in canary.compilers(canary.processes(), os.getpid())
        assert canary.compilers(canary.processes(), child.pid + 1) == []
        child.kill()


class Engine(BaseHTTPRequestHandler):
    steps = 3
    status = 200
    asked: list[str | None] = []

    def do_GET(self) -> None:
        self.reply(
            f"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
            f"vllm:iteration_tokens_total_count {Engine.steps}\n", 200)  # fmt: skip

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["max_tokens"] == 1
        Engine.asked.append(self.headers.get("Authorization"))
        self.reply("{}", Engine.status)

    def reply(self, text: str, status: int) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url():
    Engine.asked, Engine.status = [], 200
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("status", "failures"), [(200, 0), (500, 1)])
def test_the_file_says_what_happened(url, tmp_path, wait_for, status, failures) -> None:
    Engine.status = status
    now = [0.0]
    watcher = Watcher(tmp_path / "run" / "health.json", "g1", url, "m", (1,), "planted-key",
                      clock=lambda: now[0])  # fmt: skip
    watcher.look()
    now[0] = IDLE_S
    watcher.look()
    wait_for(lambda: watcher.canary.asked is None)
    watcher.look()
    text = watcher.file.read_text()
    said = json.loads(text)
    assert (said["steps"], said["running"], said["failures"]) == (3, 0, failures)
    assert said["beat"] == 3 and said["generation"] == "g1" and text.count("\n") == 1
    assert Engine.asked == ["Bearer planted-key"] and "planted-key" not in text


def test_an_engine_that_is_not_there_is_unknown(tmp_path) -> None:
    watcher = Watcher(tmp_path / "health.json", "g1", "http://127.0.0.1:9", "m", (1,))
    watcher.look()
    assert json.loads(watcher.file.read_text())["steps"] is None


@pytest.mark.parametrize("early", [True, False])
def test_it_ends_with_its_parent(tmp_path, early) -> None:
    """However early the parent goes: one that was gone before the first look left it for ever."""
    code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, {str(DOCKER / 'canary.py')!r}, sys.argv[1],\n"
        "    '--parent', str(os.getpid())])\n"
        "print(child.pid, flush=True)\n"
        f"while not ({early} or os.path.exists(sys.argv[1])): time.sleep(0.05)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "h.json")],
                          capture_output=True, text=True, timeout=30)  # fmt: skip
    pid, begin = int(done.stdout), time.monotonic()
    while Path(f"/proc/{pid}").exists() and time.monotonic() - begin < 10:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
    assert early or json.loads((tmp_path / "h.json").read_text())["running"] is None


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (
            "vllm serve /model --port 8888 --served-model-name name",
            ["http://127.0.0.1:8888", "name"],
        ),
        ("vllm serve /model --host=0.0.0.0", ["http://127.0.0.1:8000", "/model"]),
        ("vllm serve /model --host :: --port=1", ["http://[::1]:1", "/model"]),
        ("vllm serve", ["http://127.0.0.1:8000", ""]),
    ],
)
def test_process_1_tells_it_where_the_engine_is(engine, told) -> None:
    argv = canary.command(Path("/run/h.json"), "g1", 7, engine.split(), 0)
    assert argv[2:] == ["/run/h.json", "--generation", "g1", "--root", "7", "--parent",
                        str(os.getpid()), "--url", told[0], "--model", told[1]]  # fmt: skip
    assert "--url" not in canary.command(Path("/run/h.json"), "g1", 7, engine.split(), 1)
