"""Whether a TCP port is free, and who has it when it is not."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from glm_launch.procs import PROC

_LISTEN = "0A"


def is_free(host: str, port: int) -> bool:
    """Whether a server could bind `host:port` at this moment."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


def accepts(host: str, port: int) -> bool:
    """Whether something accepts connections at `host:port`."""
    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False


def next_free(host: str, port: int, tries: int = 50) -> int | None:
    """The first free port above `port`."""
    candidates = range(port + 1, min(port + 1 + tries, 65536))
    return next((candidate for candidate in candidates if is_free(host, candidate)), None)


def owner(port: int) -> str:
    """Who listens on `port`, such as "python (pid 4711)"; "unknown" when that is not visible."""
    inodes = _listening_inodes(port)
    for descriptor in PROC.glob("[0-9]*/fd/*"):
        with suppress(OSError):
            target = str(descriptor.readlink())
            if target.startswith("socket:[") and target[8:-1] in inodes:
                process = descriptor.parents[1]
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return "unknown"


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in (PROC / "net/tcp", PROC / "net/tcp6"):
        with suppress(OSError):
            found |= _parse(table, port)
    return found


def _parse(table: Path, port: int) -> set[str]:
    rows = (line.split() for line in table.read_text().splitlines()[1:])
    return {
        row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port
    }
