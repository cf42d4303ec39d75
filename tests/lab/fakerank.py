"""Behaves like `vllm serve` as far as a launcher can see, in one file without packages.

    fakerank.py serve MODEL [--headless] [--nnodes N --node-rank R --master-addr A --master-port P]
                [--host H --port P --served-model-name NAME]

The head waits for all workers at the master port, then answers /health, /v1/models, /metrics and
/v1/completions. A worker that goes away is noticed at the next request, which gets 500, and the
head then ends with code 0: vLLM does that. `POST /fake` with {"do": "crash"|"exit"|"stall"} causes
trouble; FAKE_TROUBLE=crash-at-start ends a rank before it joins, =hang never lets it, =stall lets
the head begin stalled.
"""

import argparse
import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STEP_S = 10.0


def say(text: str) -> None:
    print(f"INFO {text}", flush=True)


class State:
    workers: list[socket.socket] = []
    tokens = 0
    running = 0
    stalled = False
    lock = threading.Lock()

    @classmethod
    def whole(cls) -> bool:
        """One step of all ranks; one at a time, or a request takes the answer of another."""
        with cls.lock:
            return all(map(cls.steps, cls.workers))

    @staticmethod
    def steps(worker: socket.socket) -> bool:
        worker.settimeout(STEP_S)
        try:
            worker.sendall(b"step\n")
            return worker.recv(16) != b""
        except OSError:
            return False

    @classmethod
    def count(cls, running: int, tokens: int = 0) -> None:
        with cls.lock:
            cls.running += running
            cls.tokens += tokens


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: argparse.Namespace

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200, {})
        elif self.path == "/metrics":
            text = (
                f"vllm:num_requests_running {State.running}\n"
                "vllm:num_requests_waiting 0\n"
                f"vllm:iteration_tokens_total_count {State.tokens}\n"
            )
            self.reply(200, text)
        elif self.path == "/v1/models" and self.allowed():
            self.reply(200, {"data": [{"id": self.options.served_model_name}]})
        else:
            self.reply(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path == "/fake":
            self.trouble(body["do"])
        elif self.path == "/v1/completions" and self.allowed():
            self.complete(body)

    def allowed(self) -> bool:
        key = os.environ.get("VLLM_API_KEY")
        good = not key or self.headers.get("Authorization") == f"Bearer {key}"
        if not good:
            self.reply(401, {"error": "no key"})
        return good

    def complete(self, body: dict) -> None:
        State.count(1)
        while State.stalled:
            time.sleep(0.1)
        if not State.whole():
            self.reply(500, {"error": "EngineDeadError: a worker is gone"})
            print("ERROR EngineDeadError: a worker is gone", flush=True)
            os._exit(0)
        State.count(-1, 1)
        count = int(body.get("max_tokens", 4))
        self.reply(
            200, {"choices": [{"text": "lab " * count}], "usage": {"completion_tokens": count}}
        )

    def trouble(self, what: str) -> None:
        self.reply(200, {})
        if what == "stall":
            State.stalled = True
        else:
            os._exit(1 if what == "crash" else 0)

    def reply(self, status: int, value: object) -> None:
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


def ready() -> None:
    """What `busyrank.py` does once the API listens."""


def meet(options: argparse.Namespace) -> None:
    listener = socket.create_server((options.master_addr, options.master_port))
    say("Initializing a V1 LLM engine (fake)")
    while len(State.workers) < options.nnodes - 1:
        State.workers.append(listener.accept()[0])
        say(f"{len(State.workers)} worker(s) joined")


def work(options: argparse.Namespace) -> None:
    say("headless multiproc executor (fake)")
    while True:
        try:
            head = socket.create_connection((options.master_addr, options.master_port), timeout=2)
            break
        except OSError:
            time.sleep(0.1)
    head.settimeout(None)
    while step := head.recv(16):
        head.sendall(step)
    say("the head is gone; a worker of vLLM stays, so does this one")
    threading.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--headless", action="store_true")
    for name, default in (("nnodes", 1), ("node-rank", 0), ("master-port", 29521), ("port", 8000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (
        ("master-addr", "127.0.0.1"), ("host", "127.0.0.1"), ("served-model-name", "fake"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    options, _ = parser.parse_known_args()
    if os.environ.get("FAKE_TROUBLE") == "crash-at-start":
        sys.exit("RuntimeError: planted failure")
    if os.environ.get("FAKE_TROUBLE") == "hang":
        threading.Event().wait()
    State.stalled = os.environ.get("FAKE_TROUBLE") == "stall"
    if options.headless:
        work(options)
    meet(options)
    for line in ("Starting to load model", "Loading weights took 0.1 s", "GPU KV cache size: 1"):
        say(line)
    Api.options = options
    server = ThreadingHTTPServer((options.host, options.port), Api)
    server.daemon_threads = True
    say("Application startup complete")
    ready()
    server.serve_forever()


if __name__ == "__main__":
    main()
