"""When is a launch ready? When a real completion came back, and not before.

`/health` answers 200 while a worker is dead or the model answers nothing, so readiness is decided
by a canary request. While waiting, every rank is looked at (one that ended fails the launch at
once, with the cause from its log) and the logs tell which phase the engine is in.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm_launch import ports
from glm_launch.errors import Finding, LaunchFailedError
from glm_launch.plan import LaunchPlan
from glm_launch.runner import NodeState

POLL_S = 0.1
CANARY_TIMEOUT_S = 300.0
LOST_S = 20.0

PHASES: tuple[tuple[str, re.Pattern[str] | None], ...] = (
    ("importing the engine", None),
    ("joining the ranks", re.compile(r"Initializing a V1 LLM engine|headless multiproc executor")),
    ("reading the weights", re.compile(r"Starting to load model|Loading safetensors")),
    ("making the KV cache", re.compile(r"Loading weights took|Model loading took")),
    ("starting the API", re.compile(r"GPU KV cache size|KV cache size:|init engine .* took")),
    ("waiting for a first answer", re.compile(r"Application startup complete")),
)  # fmt: skip
_ERROR = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception|Exit))(?:: |\()(.+)$")
_OURS = "glm-exl3: error: "
_UNASKED = re.compile(r"^the engine ended with -?\d+ after")
_NO_ERROR = re.compile(r"\b(DEBUG|INFO|WARNING)\b")
_WRAPPERS = ("See root cause", "initialization failed", "Engine core proc", "died unexpectedly")


@dataclass
class LogWatch:
    """Follows the logs of all ranks and remembers how far the engine got."""

    logs: Sequence[Path]
    offsets: dict[Path, int] = field(default_factory=dict)
    phase: int = 0

    def advance(self) -> int:
        """Read what is new; the index of the current phase."""
        for log in self.logs:
            for line in self.new_lines(log):
                for index in range(self.phase + 1, len(PHASES)):
                    pattern = PHASES[index][1]
                    if pattern is not None and pattern.search(line):
                        self.phase = index
        return self.phase

    def new_lines(self, log: Path) -> list[str]:
        try:
            with log.open("rb") as stream:
                stream.seek(self.offsets.get(log, 0))
                data = stream.read()
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        self.offsets[log] = self.offsets.get(log, 0) + whole
        return data[:whole].decode("utf-8", "replace").splitlines()


def complete(base_url: str, model: str, key: str | None, timeout_s: float) -> str | None:
    """Ask for a few tokens; the text, or None while the server is not there yet.

    Raises `LaunchFailedError` when the server answers with an error.
    """
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": model, "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    try:
        reply = httpx.post(
            f"{base_url}/v1/completions", json=body, headers=headers, timeout=timeout_s
        )
    except httpx.TransportError:
        return None
    if reply.status_code == 503:
        return None
    if reply.status_code != 200 or not reply.json()["usage"]["completion_tokens"]:
        raise LaunchFailedError(
            Finding(
                "canary-failed",
                f"the first completion gave HTTP {reply.status_code}: {reply.text[:300]}",
                "a server that cannot answer one request is not ready",
                "./start.sh logs shows what the engine said",
            )
        )
    return str(reply.json()["choices"][0]["text"])


@dataclass
class Waiting:
    """Everything `wait_ready` needs to look at; tests replace parts of it."""

    plan: LaunchPlan
    observe: Callable[[], Sequence[NodeState]]
    watch: LogWatch
    on_phase: Callable[[str, float], None]
    canary: Callable[[], str | None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    lost_since: dict[int, float] = field(default_factory=dict)


def wait_ready(waiting: Waiting) -> dict[str, float]:
    """Return when a completion came back: seconds at which each phase began, and `READY`.

    Raises `LaunchFailedError` when a rank ended, the canary failed or time ran out.
    """
    begin = waiting.clock()
    times: dict[str, float] = {}
    pool = ThreadPoolExecutor(1)
    pending: Future[str | None] | None = None
    try:
        while True:
            elapsed = waiting.clock() - begin
            name = PHASES[waiting.watch.advance()][0]
            if name not in times:
                times[name] = elapsed
                waiting.on_phase(name, elapsed)
            raise_if_ended(_patient(waiting, waiting.observe()))
            if pending is None and _listens(waiting.plan):
                pending = pool.submit(waiting.canary)
            elif pending is not None and pending.done():
                if pending.result() is not None:
                    return times | {"READY": waiting.clock() - begin}
                pending = None
            if elapsed > waiting.plan.ready_timeout_s:
                raise LaunchFailedError(_too_late(waiting.plan, name))
            waiting.sleep(POLL_S)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _patient(waiting: Waiting, states: Sequence[NodeState]) -> list[NodeState]:
    """The states, those left out whose node has not answered only for a short while.

    A connection over ssh may fail once without any harm to the rank.
    """
    now = waiting.clock()
    if waiting.plan.runtime == "local":
        return list(states)
    kept = []
    for state in states:
        if state.state != "lost":
            waiting.lost_since.pop(state.rank, None)
        elif now - waiting.lost_since.setdefault(state.rank, now) < LOST_S:
            continue
        kept.append(state)
    return kept


def _listens(plan: LaunchPlan) -> bool:
    host = plan.base_url.removeprefix("http://").rpartition(":")[0].strip("[]")
    return ports.accepts(host, plan.port)


def raise_if_ended(states: Sequence[NodeState]) -> None:
    """Fail with every rank that is not running, the one that ended first in front."""
    ended = [state for state in states if state.state != "running"]
    if ended:
        ended.sort(key=lambda state: state.ended_at or 0.0)
        raise LaunchFailedError(*map(_ended, ended))


def _ended(state: NodeState) -> Finding:
    after = ""
    if state.started_at is not None and state.ended_at is not None:
        after = f" after {state.ended_at - state.started_at:.0f} s"
    code = "" if state.exit_code is None else f" with {describe_exit(state.exit_code)}"
    text = cause(Path(state.log))
    text = f": {text}" if text else ""
    return Finding(
        "rank-ended",
        f"rank {state.rank} ({state.role}) {state.state}{code}{after}{text}",
        "the model needs every rank",
        f"./start.sh logs {state.role} shows its output ({state.log})",
    )  # fmt: skip


_EXITS = {
    70: "the engine ended and nobody had asked, or a node never said hello",
    78: "the nodes differ, or the environment is wrong",
    137: "killed, or out of memory",
}


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code == -9:
        return "SIGKILL (killed, or out of memory)"
    if code < 0:
        return f"signal {-code}"
    words = _EXITS.get(code)
    return f"exit code {code} ({words})" if words else f"exit code {code}"


def cause(log: Path) -> str:
    """Why a rank ended: what its entry point or its plugin said, else the engine's first error.

    Warnings and wrappers are left out; without any error it is the last line.
    """
    lines = last_lines(log, 2000)
    ours = [line.partition(_OURS)[2].strip() for line in lines if _OURS in line]
    if said := [line for line in ours if not _UNASKED.search(line)]:
        return "; ".join(dict.fromkeys(said))
    for line in lines:
        match = _ERROR.search(line)
        if match and not _NO_ERROR.search(line) and not any(w in line for w in _WRAPPERS):
            return f"{match[1].rpartition('.')[2]}: {match[2].strip()}"
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log; empty when there is none."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]


def _too_late(plan: LaunchPlan, phase: str) -> Finding:
    return Finding(
        "not-ready",
        f"no answer after {plan.ready_timeout_s} s, while {phase}",
        "a launch that does not answer holds memory for nothing",
        "./start.sh logs shows how far each rank got; READY_TIMEOUT_S sets the limit",
    )


def probe(plan: LaunchPlan, secrets: Mapping[str, str], timeout_s: float = 30.0) -> dict[str, Any]:
    """Ask the running service once: whether it answered, in how many seconds, or the error."""
    begin = time.monotonic()
    try:
        text = complete(plan.base_url, plan.served_name, secrets.get("VLLM_API_KEY"), timeout_s)
    except LaunchFailedError as error:
        return {"answered": False, "error": error.findings[0].seen}
    if text is None:
        return {"answered": False, "error": f"no answer within {timeout_s:.0f} s"}
    return {"answered": True, "seconds": round(time.monotonic() - begin, 3)}
