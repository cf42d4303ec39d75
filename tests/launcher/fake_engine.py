"""Stands in for `vllm serve`: the same arguments, an HTTP server, and trouble on request.

    fake_engine.py [--trouble ROLE:KIND] serve MODEL ...

Troubles: `crash` (an error and exit 1 at once), `exit0` (ends with 0 after READY was possible),
`silent` (never listens), `broken` (answers 500), `stubborn` (ignores SIGTERM), `orphan` (starts a
child that ignores SIGTERM and ends itself), `useless` (no draft is ever accepted).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Handler(BaseHTTPRequestHandler):
    status = 200
    panels = 0
    accepted = 140

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/chat/completions" and body.get("stream"):
            return self.stream(body)
        Handler.panels += isinstance(body.get("prompt"), list)
        usage = {"prompt_tokens": 1, "completion_tokens": 4}
        reply = {"choices": [{"text": " there", "finish_reason": "length"}], "usage": usage}
        return self.send(json.dumps(reply), self.status)

    def do_GET(self) -> None:
        if self.path == "/env":
            return self.send(json.dumps(dict(os.environ)))
        counts = {"drafts": 100, "draft_tokens": 700, "accepted_tokens": Handler.accepted}
        lines = (f"vllm:spec_decode_num_{name}_total {count * Handler.panels}\n"
                 for name, count in counts.items())  # fmt: skip
        return self.send("".join(lines))

    def stream(self, body: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for count in range(1, body["max_tokens"] + 1):
            event = {
                "choices": [{"delta": {"content": f"word{count} "}, "finish_reason": None}],
                "usage": {"prompt_tokens": 3, "completion_tokens": count},
            }
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trouble", default=":")
    parser.add_argument("verb")
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--headless", action="store_true")
    options, _ = parser.parse_known_args()
    role, trouble = options.trouble.split(":")
    if role != ("worker" if options.headless else "head"):
        trouble = ""
    play(options, trouble)


def play(options: argparse.Namespace, trouble: str) -> None:
    print("Starting to load model", flush=True)
    if trouble == "crash":
        print("ERROR ValueError: layer 3 has no scales", flush=True)
        print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
        sys.exit(1)
    if trouble == "orphan":
        subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
        sys.exit(3)
    if trouble == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if not options.headless and trouble != "silent":
        Handler.status = 500 if trouble == "broken" else 200
        Handler.accepted = 0 if trouble == "useless" else Handler.accepted
        server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print("Application startup complete", flush=True)
    time.sleep(3 if trouble == "exit0" else 600)


if __name__ == "__main__":
    main()
