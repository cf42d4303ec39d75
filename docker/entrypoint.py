"""PID 1 of a node's container, with `vllm serve` as its child.

    entrypoint.py vllm serve MODEL ...

What: reads and checks its environment, says hello to the other nodes (`hello.py`), starts the
engine, passes SIGTERM on, reaps every process that is left to it, and ends with a code that means
something. A worker ends its engine when it hears nothing from the head (`watch.py`); every node
notes in health.json what `canary.py` sees.
Why this shape: an engine that lost a worker exits 0, so the code of the child says
nothing; whether anybody asked it to stop does. What must stay true: exit 0 only after SIGTERM or
SIGINT; EXIT_ENGINE (70) for any other end of the engine; EXIT_DIFFERS (78) when the environment is
wrong or the nodes differ, before the engine starts; the API key is read from a file and reaches the
engine's environment only, so neither the arguments nor `docker inspect` show it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import canary
from hello import EXIT_DIFFERS, EXIT_ENGINE, Hello, Meeting, Verdict, Visit
from watch import HeadWatch

PREFIX = "GLM_EXL3_"
LOOK_S = 1.0
DIGEST_TIMEOUT_S = 300.0
_PR_SET_CHILD_SUBREAPER = 36

PER_NODE_FLAGS = {
    "--node-rank": 1, "-r": 1, "--headless": 0, "--host": 1, "--port": 1, "--served-model-name": 1,
    "--reasoning-parser": 1, "--tool-call-parser": 1, "--enable-auto-tool-choice": 0,
    "--api-key": 1, "--chat-template": 1, "--allowed-media-domains": 1,
}  # fmt: skip
COMPARED = re.compile(r"^(VLLM|NCCL|GLM_EXL3|EXL3|TORCH|PYTORCH|CUDA|TRITON|FLASHINFER|HF_HUB)_")
PER_NODE_NAMES = frozenset({
    "GLM_EXL3_NODE_RANK", "GLM_EXL3_GENERATION", "GLM_EXL3_NODES", "GLM_EXL3_HEAD",
    "GLM_EXL3_MODEL_MANIFEST", "GLM_EXL3_DRAFTER_MANIFEST", "GLM_EXL3_RUN_DIR",
    "GLM_EXL3_HELLO_TIMEOUT_S", "GLM_EXL3_WATCH_PORT", "VLLM_HOST_IP", "VLLM_API_KEY_FILE",
    "VLLM_CPU_OMP_THREADS_BIND", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX",
    "CUDA_VISIBLE_DEVICES",
})  # fmt: skip
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


@dataclass(frozen=True)
class Settings:
    """The checked environment of one node."""

    generation: str
    node_rank: int
    nodes: int
    head: str
    watch_port: int
    model: str
    drafter: str
    hello_timeout_s: float
    run_dir: Path
    key: str | None


class Reader:
    """Reads variables and collects what is wrong with them, all of it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[str] = []

    def text(self, name: str, default: str, pattern: str, allowed: str) -> str:
        value = self.environ.get(name, "") or default
        if not re.fullmatch(pattern, value):
            self.problems.append(f"{name}={value!r}: must be {allowed}")
        return value

    def number(self, name: str, default: int, low: int, high: int) -> int:
        value = self.environ.get(name, "") or str(default)
        if not re.fullmatch(r"\d{1,9}", value) or not low <= int(value) <= high:
            self.problems.append(f"{name}={value!r}: must be a number from {low} to {high}")
            return default
        return int(value)

    def secret(self, name: str) -> str | None:
        """The content of the file that variable `name` points to; never part of a message."""
        path = self.environ.get(name, "")
        if not path:
            return None
        try:
            key = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(f"{name}={path!r}: cannot be read ({type(error).__name__})")
            return None
        if not key or len(key.split()) > 1:
            self.problems.append(f"{name}={path!r}: must hold one key and nothing else")
        return key


def read_settings(environ: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """The settings, and everything that is wrong with them."""
    read = Reader(environ)
    nodes = read.number(f"{PREFIX}NODES", 1, 1, 64)
    manifest = r"[0-9a-zA-Z:._-]{0,128}"
    settings = Settings(
        generation=read.text(
            f"{PREFIX}GENERATION", "manual", r"[\w.-]{1,64}", "1 to 64 letters, digits, '.', '-'"
        ),
        node_rank=read.number(f"{PREFIX}NODE_RANK", 0, 0, nodes - 1),
        nodes=nodes,
        head=read.text(
            f"{PREFIX}HEAD", "" if nodes > 1 else "127.0.0.1", r"[\w.:-]+",
            "the head's address on the fabric when there are several nodes",
        ),
        watch_port=read.number(f"{PREFIX}WATCH_PORT", 29522, 1, 65535),
        model=read.text(f"{PREFIX}MODEL_MANIFEST", "", manifest, "a hash"),
        drafter=read.text(f"{PREFIX}DRAFTER_MANIFEST", "", manifest, "a hash"),
        hello_timeout_s=float(read.number(f"{PREFIX}HELLO_TIMEOUT_S", 600, 1, 86_400)),
        run_dir=Path(environ.get(f"{PREFIX}RUN_DIR") or "/run/glm-exl3"),
        key=read.secret("VLLM_API_KEY_FILE"),
    )  # fmt: skip
    return settings, read.problems


def shared_arguments(argv: Sequence[str]) -> tuple[str, ...]:
    """The engine's arguments without those that belong to one node."""
    kept: list[str] = []
    parts = iter(argv)
    for part in parts:
        flag, equals, _ = part.partition("=")
        values = PER_NODE_FLAGS.get(flag)
        if values is None:
            kept.append(part)
        elif values and not equals:
            next(parts, None)
    return tuple(kept)


def shared_environment(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Variables that must be equal on all nodes; no secret is among them."""
    return tuple(
        sorted(
            (name, value)
            for name, value in environ.items()
            if COMPARED.match(name) and name not in PER_NODE_NAMES and not _SECRET.search(name)
        )
    )


def plugin_digest() -> str:
    """What the plugin calls its digest; "absent" where it is not installed.

    A process of its own, because importing the plugin's parts costs memory that PID 1 would keep.
    Raises `subprocess.SubprocessError`.
    """
    code = (
        "import importlib.util, sys\n"
        "if importlib.util.find_spec('glm_exl3') is None: sys.exit('absent')\n"
        "from glm_exl3.plugin import make_digest\n"
        "sys.stderr.write(f'digest {make_digest()}\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False, capture_output=True, text=True, timeout=DIGEST_TIMEOUT_S,
    )  # fmt: skip
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if last == "absent":
        return last
    if done.returncode or not last.startswith("digest "):
        raise subprocess.SubprocessError(last or f"exit code {done.returncode}")
    return last.removeprefix("digest ")


class Node:
    """One node's life: hello, engine, end."""

    def __init__(self, settings: Settings, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self.settings = settings
        self.argv = list(argv)
        self.environ = dict(environ)
        self.asked = False
        self.engine: subprocess.Popen[bytes] | None = None
        self.canary: subprocess.Popen[bytes] | None = None
        self.watch: HeadWatch | None = None
        self.orphaned: str | None = None
        self.verdict: Verdict | None = None
        self.side: Meeting | Visit | None = None
        self.threads: list[threading.Thread] = []
        self.wakeup, self._wake = os.pipe()

    def run(self) -> int:
        """The exit code. Threads end first: one cut off at the interpreter's end may crash it."""
        try:
            return self._run()
        finally:
            for part in (self.side, self.watch):
                if part is not None:
                    part.close()
            for thread in self.threads:
                thread.join(LOOK_S)

    def _run(self) -> int:
        self._listen()
        verdict = self._meet()
        if self.asked:
            return 0
        if verdict.code:
            for reason in verdict.reasons:
                say(f"error: {reason}")
            return verdict.code
        return self._serve()

    def _listen(self) -> None:
        """Signals become bytes on a pipe, so that waiting for them and for children is one wait."""
        for descriptor in (self.wakeup, self._wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def _stop(self, _number: int, _frame: object) -> None:
        self.asked = True
        if self.engine is not None:
            self.engine.send_signal(signal.SIGTERM)

    def _meet(self) -> Verdict:
        settings = self.settings
        self._note("hello")
        if settings.nodes == 1:
            return Verdict(0)
        try:
            mine = self._hello()
        except (subprocess.SubprocessError, OSError) as error:
            return Verdict(EXIT_DIFFERS, (f"the plugin does not load: {error}",))
        address = (settings.head, settings.watch_port)
        kind = Visit if settings.node_rank else Meeting
        side = self.side = kind(mine, address, settings.hello_timeout_s, say)
        self._in_thread(self._conclude, side)
        while self.verdict is None and not self.asked:
            self._wait()
        if self.verdict is None:
            return Verdict(0)
        if self.verdict.code == 0:
            self._stay_in_touch(side)
        return self.verdict

    def _stay_in_touch(self, side: Meeting | Visit) -> None:
        """The head tells that it lives; a worker listens."""
        if isinstance(side, Meeting):
            self._in_thread(side.keep)
        elif side.connection is not None:
            self.watch = HeadWatch(side.connection, self.settings.generation)
            self._in_thread(self._hear, self.watch)

    def _hear(self, watch: HeadWatch) -> None:
        self.orphaned = watch.run()
        os.write(self._wake, b"\0")

    def _hello(self) -> Hello:
        return Hello(
            generation=self.settings.generation,
            node_rank=self.settings.node_rank,
            nodes=self.settings.nodes,
            node=socket.gethostname(),
            plugin=plugin_digest(),
            model=self.settings.model,
            drafter=self.settings.drafter,
            arguments=shared_arguments(self.argv),
            environment=shared_environment(self.environ),
        )

    def _conclude(self, side: Meeting | Visit) -> None:
        self.verdict = side.run()
        os.write(self._wake, b"\0")

    def _in_thread(self, work: Callable[..., None], *arguments: object) -> None:
        self.threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self.threads[-1].start()

    def _serve(self) -> int:
        env = self.environ | ({"VLLM_API_KEY": self.settings.key} if self.settings.key else {})
        try:
            self.engine = subprocess.Popen(self.argv, env=env, start_new_session=True)
        except OSError as error:
            say(f"error: {self.argv[0]} cannot be started: {error.strerror}")
            return EXIT_DIFFERS
        self._note("engine")
        self._start_canary(env)
        if self.asked:
            self.engine.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        while (code := reap(self.engine.pid)) is None:
            if self.orphaned and not self.asked:
                say(f"error: {self.orphaned}, so this rank ends")
                os.killpg(self.engine.pid, signal.SIGKILL)
            self._wait()
        self.engine.returncode = code
        if self.canary is not None:
            self.canary.kill()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.engine.pid, signal.SIGKILL)
        self._note("ended", exit_code=code)
        if self.asked:
            return 0
        say(f"error: the engine ended with {code} after {time.monotonic() - begin:.0f} s, unasked")
        return EXIT_ENGINE

    def _start_canary(self, env: Mapping[str, str]) -> None:
        """A child that writes health.json and ends with us; only the head's asks the engine."""
        file, generation = self.settings.run_dir / "health.json", self.settings.generation
        argv = canary.command(file, generation, os.getpid(), self.argv, self.settings.node_rank)
        with suppress(OSError):
            self.canary = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL)

    def _wait(self) -> None:
        ready, _, _ = select.select([self.wakeup], [], [], LOOK_S)
        if ready:
            os.read(self.wakeup, 4096)

    def _note(self, phase: str, **more: object) -> None:
        """Leave the state for the health check; a read-only folder is not an error."""
        state = {
            "phase": phase, "generation": self.settings.generation, "since": time.time(),
            "node_rank": self.settings.node_rank, "pid": os.getpid(),
            "engine_pid": self.engine.pid if self.engine else None,
            "host": canary.option(self.argv, "--host", "127.0.0.1"),
            "port": int(canary.option(self.argv, "--port", "8000")), **more,
        }  # fmt: skip
        with suppress(OSError):
            self.settings.run_dir.mkdir(parents=True, exist_ok=True)
            draft = self.settings.run_dir / "state.tmp"
            draft.write_text(json.dumps(state))
            draft.replace(self.settings.run_dir / "state.json")


def reap(engine: int) -> int | None:
    """Collect every child that ended; the exit code of `engine` when it was among them."""
    code = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == engine:
                code = os.waitstatus_to_exitcode(status)
    return code


def say(text: str) -> None:
    sys.stderr.write(f"glm-exl3: {text}\n")
    sys.stderr.flush()


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    settings, problems = read_settings(environ)
    if not argv:
        problems.append("no command: the arguments are the engine's command line")
    if problems:
        for problem in problems:
            say(f"error: {problem}")
        return EXIT_DIFFERS
    return Node(settings, argv, environ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
