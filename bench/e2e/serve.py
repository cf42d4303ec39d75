"""Start a server, note when it answers, measure it over HTTP, stop it.

    python -m e2e.serve RESULT.json [--prefill 8192,32768] [--requests 1,16]
        [--beside "WORKER COMMAND"] -- COMMAND ...

READY is the first completion of one token, counted from the start of the command; `/health` proves
nothing. The longest request that the server takes is noted, too. The command is the engine's own
(`vllm serve ...`) and must listen on `--url`. Its output goes to stdout. `--beside` commands, such
as a headless worker, start before it and stop after it. Behind READY comes `glm_bench.load`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glm_bench import load
from glm_bench.client import Endpoint, ServerError, first_model, served_model

POLL_S = 0.5
STOP_S = 20


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def wait_ready(
    url: str,
    server: subprocess.Popen[bytes],
    limit_s: float,
    others: Sequence[subprocess.Popen[bytes]] = (),
) -> tuple[Endpoint, float]:
    """The endpoint and the seconds until it completed a token. Raises TimeoutError, or
    RuntimeError when the server or one beside it ended first."""
    start = time.perf_counter()
    while time.perf_counter() - start < limit_s:
        for process in (server, *others):
            if process.poll() is not None:
                raise RuntimeError(f"status {process.returncode} before READY: {process.args!r}")
        try:
            endpoint = Endpoint(url, served_model(url, None))
            load.stream_tokens(endpoint, load.Prompts()(8), 1, start)
        except ServerError:
            time.sleep(POLL_S)
        else:
            return endpoint, time.perf_counter() - start
    raise TimeoutError(f"no completion within {limit_s:g} s")


def measure(endpoint: Endpoint, options: argparse.Namespace, save: Any) -> None:
    """Decode at every number of requests, then the cold prompts; `save` gets each row."""
    prompts = load.Prompts()
    load.decode(endpoint, max(options.requests), 64, 16, prompts)
    for requests in options.requests:
        save(asdict(load.decode(endpoint, requests, options.context, options.tokens, prompts)))
    for context in options.prefill:
        save(asdict(load.prefill(endpoint, context, prompts)))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m e2e.serve")
    made.add_argument("result", type=Path)
    made.add_argument("--url", default="http://127.0.0.1:8888/v1")
    made.add_argument("--requests", type=numbers, default=[1, 2, 4, 8, 16])
    made.add_argument("--context", type=int, default=1024)
    made.add_argument("--tokens", type=int, default=64)
    made.add_argument("--prefill", type=numbers, default=[])
    made.add_argument("--limit", type=float, default=900.0, help="seconds to READY")
    made.add_argument("--beside", type=shlex.split, action="append", default=[])
    made.add_argument("command", nargs="+")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, run the server, write the result after every row."""
    options = parser().parse_args(arguments)
    result: dict[str, Any] = {"command": options.command, "rows": []}

    def save(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        options.result.write_text(json.dumps(result))

    others = [subprocess.Popen(command) for command in options.beside]
    server = subprocess.Popen(options.command)
    try:
        endpoint, result["ready_s"] = wait_ready(options.url, server, options.limit, others)
        result["max_model_len"] = first_model(options.url, None).get("max_model_len")
        measure(endpoint, options, save)
    finally:
        options.result.write_text(json.dumps(result))
        for process in (server, *others):
            stop(process)


def descendants(pid: int) -> list[int]:
    """Processes below `pid`: its children, theirs, and so on."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found = list(parents.get(pid, []))
    for one in found:
        found += parents.get(one, [])
    return found


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started here, politely first, and whatever it leaves behind: an
    engine's process without its server would keep the GPU."""
    below = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
