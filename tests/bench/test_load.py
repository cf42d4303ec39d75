"""The load protocols: how arrivals become figures, and against a server that answers as told."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from glm_bench import cli, load
from glm_bench.client import ServerError
from glm_bench.load import Arrivals, Prompts, arrivals, decode_row

GAP_S = 0.004
QUIET_S = 0.5


def steady(first_s: float, gap_s: float, tokens: int, per_chunk: int = 1) -> Arrivals:
    steps = range(tokens // per_chunk)
    return Arrivals(tuple((first_s + gap_s * i, per_chunk * (i + 1)) for i in steps))


def test_only_the_time_when_all_run_counts() -> None:
    late = steady(2.0, 0.01, 100)
    early = steady(0.0, 0.01, 251)
    row = decode_row([early, late], 1024, 100)
    assert row.tokens_per_s == pytest.approx(200, rel=0.02)
    assert row.step_ms == pytest.approx(10, rel=0.02)
    assert row.ttft_last_s == 2.0


def test_a_drafting_step_brings_several_tokens() -> None:
    row = decode_row([steady(0.0, 0.01, 90, per_chunk=3)], 8, 90, per_step=3.0)
    assert row.tokens_per_s == pytest.approx(300)
    assert row.step_ms == pytest.approx(10)


def test_requests_that_never_ran_together_are_an_error() -> None:
    with pytest.raises(ServerError, match="never ran together"):
        decode_row([steady(0.0, 0.01, 5), steady(1.0, 0.01, 5)], 8, 5)


def test_a_stream_without_counts_is_an_error() -> None:
    with pytest.raises(ServerError, match="no token"):
        arrivals([{"choices": [{"text": "word"}]}], lambda: 0.0)


def test_prompts_never_repeat() -> None:
    prompts = Prompts(seed=1)
    first, second = prompts(500), prompts(500)
    assert first != second
    assert all(load.LOWEST_ID <= token < load.HIGHEST_ID for token in first + second)


class Server(BaseHTTPRequestHandler):
    """Answers once no request has come for a while, so that those of one load run together."""

    last_s = 0.0

    def do_GET(self) -> None:
        self.send_response(200 if self.path.endswith("/models") else 404)
        self.end_headers()
        if self.path.endswith("/models"):
            self.wfile.write(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(body["prompt"][0], int)
        Server.last_s = time.monotonic()
        while time.monotonic() < Server.last_s + QUIET_S:
            time.sleep(GAP_S)
        self.send_response(200)
        self.end_headers()
        for count in range(1, body["max_tokens"] + 1):
            time.sleep(GAP_S)
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            event = json.dumps({"choices": [{"text": ""}], "usage": usage})
            self.wfile.write(f"data: {event}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *arguments: object) -> None:
        pass


def test_the_command_writes_a_row_per_load(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    sizes = ["--requests", "1,3", "--context", "16", "--max-tokens", "40", "--prefill", "64"]
    try:
        assert cli.run(["load", "--url", url, *sizes, "--output", str(tmp_path / "r.json")]) == 0
    finally:
        server.shutdown()
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row.get("requests") for row in rows] == [1, 3, None]
    assert rows[0]["step_ms"] > 500 * GAP_S
    assert rows[2]["context"] == 64
