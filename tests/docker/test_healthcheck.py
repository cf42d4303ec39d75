"""The health check against the state that PID 1 leaves and a real HTTP server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import healthcheck


@pytest.fixture
def judge(tmp_path):
    def judge(**state: object) -> tuple[bool, str]:
        base = {"phase": "engine", "engine_pid": os.getpid(), "node_rank": 1, "host": "", "port": 1}
        (tmp_path / "state.json").write_text(json.dumps(base | state))
        return healthcheck.judge({"GLM_EXL3_RUN_DIR": str(tmp_path)})

    return judge


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self) -> None:
            self.send_response(self.status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, Handler
    server.shutdown()
    server.server_close()


def test_a_worker_is_healthy_while_its_engine_runs(judge) -> None:
    assert judge()[0]


def test_no_state_and_no_engine_are_unhealthy(judge, tmp_path) -> None:
    assert not healthcheck.judge({"GLM_EXL3_RUN_DIR": str(tmp_path)})[0]
    assert judge(phase="hello", engine_pid=None) == (False, "no engine, PID 1 is at: hello")
    assert not judge(phase="ended")[0]


def test_a_dead_and_a_stopped_engine_are_unhealthy(judge) -> None:
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert "in state T" in judge(engine_pid=process.pid)[1]
    process.kill()
    process.wait()
    assert "in state X" in judge(engine_pid=process.pid)[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_head_has_to_answer(judge, server, host) -> None:
    http, handler = server
    state = {"node_rank": 0, "host": host, "port": http.server_port}
    assert judge(**state)[0]
    handler.status = 503
    assert judge(**state) == (False, f"/health at 127.0.0.1:{http.server_port} gives 503")


def test_a_head_that_does_not_listen_is_unhealthy(judge) -> None:
    assert judge(node_rank=0, host="127.0.0.1", port=1)[0] is False
