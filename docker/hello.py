"""Hello: all nodes compare what they are about to run, before any of them starts vLLM.

What: the head's PID 1 listens on the fabric address; every other node's PID 1 sends one JSON line
that says what it would run; when all are there the head answers `go` to each, or `refuse` with
every difference. Why this shape: a rank with other code or other settings does not fail in vLLM, it
hangs or computes different numbers, and nothing in vLLM compares them. What must stay true: a node
starts its engine only after `go`; when something differs, every node that came hears the reason and
ends with EXIT_DIFFERS; what is not a hello is dropped and changes nothing. Not handled: nothing is
encrypted or authenticated, as on all of vLLM's own ports; the fabric is trusted.

Lines, each one JSON object (protocol 1):
    node -> head  {"type": "hello", "protocol": 1, "generation", "node_rank", "nodes", "node",
                   "plugin", "arguments_hash", "environment_hash", "model", "drafter",
                   "arguments": [...], "environment": {...}}
    head -> node  {"type": "go", "generation"}
                  {"type": "refuse", "code": 70 | 78, "reasons": [...]}
                  {"type": "alive", "generation"}      every ALIVE_S seconds after `go`
"""

from __future__ import annotations

import hashlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

PROTOCOL = 1
EXIT_ENGINE = 70
EXIT_DIFFERS = 78
ALIVE_S = 2.0
RETRY_S = 0.5
MAX_LINE_BYTES = 1 << 20
MARGIN_S = 10.0
LINGER_S = 3.0
# Linux 6.15: resend at least that often, so that `alive` is heard soon after a link came back.
TCP_RTO_MAX_MS, RESEND_MS = 44, 1000
Say = Callable[[str], None]


@dataclass(frozen=True)
class Hello:
    """What one node would run. `arguments` and `environment` are free of anything per node."""

    generation: str
    node_rank: int
    nodes: int
    node: str
    plugin: str
    model: str
    drafter: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def line(self) -> bytes:
        hashes = {
            "arguments_hash": short_hash(self.arguments),
            "environment_hash": short_hash(self.environment),
        }
        body = asdict(self) | {"environment": dict(self.environment)} | hashes
        return encode({"type": "hello", "protocol": PROTOCOL, **body})

    @classmethod
    def parse(cls, message: dict[str, Any]) -> Hello:
        """The hello of a decoded line; raises ValueError when it is none of this protocol."""
        if message.get("type") != "hello" or message.get("protocol") != PROTOCOL:
            raise ValueError("not a hello of this protocol")
        try:
            texts = [str(message[name]) for name in ("generation", "node", "plugin")]
            texts += [str(message[name]) for name in ("model", "drafter")]
            ranks = int(message["node_rank"]), int(message["nodes"])
            arguments = tuple(str(part) for part in message["arguments"])
            pairs = tuple(sorted((str(k), str(v)) for k, v in message["environment"].items()))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"incomplete hello: {error}") from error
        return cls(texts[0], *ranks, texts[1], texts[2], texts[3], texts[4], arguments, pairs)

    @property
    def who(self) -> str:
        return f"node {self.node} (rank {self.node_rank})"


@dataclass(frozen=True)
class Verdict:
    """How the hello ended: `code` 0 to go on, EXIT_DIFFERS or EXIT_ENGINE with the reasons."""

    code: int
    reasons: tuple[str, ...] = ()


def short_hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, sort_keys=True).encode() + b"\n"


def differences(hellos: Sequence[Hello]) -> tuple[str, ...]:
    """Everything in which a node differs from the head: field, both nodes, both values."""
    head, *others = sorted(hellos, key=lambda hello: hello.node_rank)
    found = []
    for other in others:
        for name in ("generation", "nodes", "plugin", "model", "drafter"):
            pair = str(getattr(head, name)), str(getattr(other, name))
            found += [] if pair[0] == pair[1] else [_difference(name, head, other, *pair)]
        for name in ("arguments", "environment"):
            ours, theirs = _named(getattr(head, name)), _named(getattr(other, name))
            found += [
                _difference(f"{name} {key}", head, other, ours.get(key), theirs.get(key))
                for key in sorted({*ours, *theirs})
                if ours.get(key) != theirs.get(key)
            ]
    return tuple(found)


def _difference(name: str, head: Hello, other: Hello, ours: str | None, theirs: str | None) -> str:
    said = ["absent" if value is None else repr(value) for value in (ours, theirs)]
    return f"{name} differs: {head.who} has {said[0]}, {other.who} has {said[1]}"


def _named(entries: Sequence[Any]) -> dict[str, str]:
    """Environment pairs by name, or arguments by flag with what follows it."""
    if entries and isinstance(entries[0], tuple):
        return dict(entries)
    found: dict[str, str] = {}
    flag = "command"
    for part in entries:
        if part.startswith("-") and not part[1:2].isdigit():
            flag, _, value = part.partition("=")
            found[flag] = value
        else:
            found[flag] = f"{found[flag]} {part}" if found.get(flag) else part
    return found


@dataclass
class Meeting:
    """The head's side; `run` in a thread of its own, `close` from anywhere."""

    mine: Hello
    address: tuple[str, int]
    timeout_s: float
    say: Say
    joined: dict[int, Hello] = field(default_factory=dict)
    connections: dict[int, socket.socket] = field(default_factory=dict)
    closed: threading.Event = field(default_factory=threading.Event)
    _buffers: dict[socket.socket, bytes] = field(default_factory=dict)
    _twice: list[str] = field(default_factory=list)

    def run(self) -> Verdict:
        """Wait for all nodes and answer them; afterwards `keep` tells them that the head lives."""
        deadline = time.monotonic() + self.timeout_s
        self.joined[self.mine.node_rank] = self.mine
        try:
            listener = socket.create_server(self.address, family=_family(self.address[0]))
        except OSError as error:
            return Verdict(EXIT_ENGINE, (f"cannot listen at {_text(self.address)}: {error}",))
        with listener, selectors.DefaultSelector() as selector:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
            while len(self.joined) < self.mine.nodes:
                if self._twice:
                    deadline = min(deadline, time.monotonic() + LINGER_S)
                left = deadline - time.monotonic()
                if left <= 0 or self.closed.is_set():
                    break
                for key, _ in selector.select(min(left, 1.0)):
                    if key.fileobj is listener:
                        self._accept(listener, selector)
                    elif isinstance(key.fileobj, socket.socket):
                        self._receive(key.fileobj, selector)
            verdict = self._judge()
            self._answer(verdict)
        return verdict

    def keep(self) -> None:
        """Tell every node that the head lives, until `close`."""
        while not self.closed.wait(ALIVE_S):
            self._send({"type": "alive", "generation": self.mine.generation})

    def close(self) -> None:
        self.closed.set()

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, RESEND_MS)
            self._buffers[connection] = b""
            selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        buffer = self._buffers[connection] + data
        self._buffers[connection] = buffer
        if not data or len(buffer) > MAX_LINE_BYTES:
            self._drop(connection, selector, "")
        elif b"\n" in buffer and connection not in self.connections.values():
            try:
                hello = Hello.parse(json.loads(buffer.partition(b"\n")[0]))
            except (ValueError, AttributeError) as error:
                self._drop(connection, selector, f"ignored a connection: {error}")
            else:
                self._join(hello, connection)

    def _join(self, hello: Hello, connection: socket.socket) -> None:
        known = self.joined.get(hello.node_rank)
        if known is not None or not 0 <= hello.node_rank < self.mine.nodes:
            other = f", and so does node {known.node}" if known else f" of {self.mine.nodes}"
            self._twice.append(
                f"node_rank differs: node {hello.node} says it is {hello.node_rank}{other}"
            )
            self.connections[-len(self._twice)] = connection
            return
        self.joined[hello.node_rank] = hello
        self.connections[hello.node_rank] = connection
        self.say(f"{hello.who} said hello, {len(self.joined)} of {self.mine.nodes} nodes are here")

    def _drop(self, connection: socket.socket, selector: selectors.BaseSelector, why: str) -> None:
        selector.unregister(connection)
        self._buffers.pop(connection)
        for rank, known in list(self.connections.items()):
            if known is connection:
                del self.connections[rank]
                hello = self.joined.pop(rank, None)
                why = f"{hello.who} went away" if hello else why
        connection.close()
        if why:
            self.say(why)

    def _judge(self) -> Verdict:
        found = (*self._twice, *differences([*self.joined.values()]))
        if found:
            return Verdict(EXIT_DIFFERS, found)
        missing = [str(rank) for rank in range(self.mine.nodes) if rank not in self.joined]
        if not missing:
            return Verdict(0)
        reason = f"no hello from rank {', '.join(missing)} within {self.timeout_s:g} s"
        return Verdict(EXIT_ENGINE, (reason,))

    def _answer(self, verdict: Verdict) -> None:
        for connection in self._buffers:
            connection.settimeout(MARGIN_S)
        if verdict.code == 0:
            self._send({"type": "go", "generation": self.mine.generation})
        else:
            self._send({"type": "refuse", "code": verdict.code, "reasons": list(verdict.reasons)})
            self.close()

    def _send(self, message: dict[str, Any]) -> None:
        for rank, connection in list(self.connections.items()):
            try:
                connection.sendall(encode(message))
            except OSError:
                connection.close()
                del self.connections[rank]


@dataclass
class Visit:
    """A worker's side; the connection stays open after `go`, since the head's `alive` uses it."""

    mine: Hello
    address: tuple[str, int]
    timeout_s: float
    say: Say
    closed: threading.Event = field(default_factory=threading.Event)
    connection: socket.socket | None = None

    def run(self) -> Verdict:
        """Reach the head, say hello, return its verdict."""
        deadline = time.monotonic() + self.timeout_s
        last = "nothing tried"
        while (left := deadline - time.monotonic()) > 0 and not self.closed.is_set():
            try:
                return self._ask(left)
            except (OSError, ValueError) as error:
                last = str(error) or type(error).__name__
                self.closed.wait(RETRY_S)
        return Verdict(
            EXIT_ENGINE,
            (f"no answer from the head at {_text(self.address)} in {self.timeout_s:g} s: {last}",),
        )

    def close(self) -> None:
        self.closed.set()

    def _ask(self, left_s: float) -> Verdict:
        connection = socket.create_connection(self.address, timeout=min(left_s, 5.0))
        try:
            connection.sendall(self.mine.line())
            self.say(f"said hello to the head at {_text(self.address)}, waiting for its answer")
            connection.settimeout(left_s + MARGIN_S)
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline(MAX_LINE_BYTES) or b"null")
            if not isinstance(answer, dict):
                raise ValueError("the head hung up")
            if answer.get("type") == "go" and answer.get("generation") == self.mine.generation:
                self.connection = connection
                return Verdict(0)
            if answer.get("type") != "refuse":
                raise ValueError(f"the head said {answer.get('type')}")
            code = EXIT_DIFFERS if answer.get("code") == EXIT_DIFFERS else EXIT_ENGINE
            return Verdict(code, tuple(map(str, answer.get("reasons", ()))))
        finally:
            if self.connection is not connection:
                connection.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]


def _text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
