"""Watches the fabric device of every node: carrier from each node itself, pings from the head.

A probe (`probe.py`) is piped to `python3 -` on each node and prints a line a second. A probe that
ended is started again; a node whose last line is old is unknown, which is no loss. Not seen: the
link between two workers that are joined directly.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm_launch.errors import Finding, LaunchFailedError
from glm_launch.nodes.ssh import Shell
from glm_launch.plan import LaunchPlan
from glm_launch.supervise import probe as program
from glm_launch.supervise.signs import LinkSign
from glm_launch.supervise.troubles import Rules, is_down

OLD_S = 4.0
AGAIN_S = 2.0
LIMIT_S = Rules.link_limit_s


@dataclass(frozen=True)
class End:
    """One node's end of the fabric."""

    node: str
    address: str
    nic: str
    shell: Shell


def ends_of(plan: LaunchPlan, shells: Mapping[str, Shell]) -> list[End]:
    """The ends of a launch over several nodes; none where there is no fabric."""
    if plan.runtime == "local" or len(plan.ranks) < 2:
        return []
    return [
        End(rank.node, env["VLLM_HOST_IP"], env.get("GLOO_SOCKET_IFNAME", ""), shells[rank.node])
        for rank in plan.ranks
        for env in [dict(rank.env)]
        if env.get("VLLM_HOST_IP")
    ]


@dataclass
class Links:
    """The latest line of every node; `ends[0]` is the head."""

    ends: Sequence[End]
    clock: Callable[[], float] = time.monotonic
    closed: threading.Event = field(default_factory=threading.Event)
    lines: dict[str, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    lost_since: float | None = None

    def start(self) -> None:
        for number, end in enumerate(self.ends):
            peers = [] if number else [other.address for other in self.ends[1:]]
            threading.Thread(target=self._follow, args=(end, peers), daemon=True).start()

    def close(self) -> None:
        """End every probe."""
        self.closed.set()
        for probe in list(self.running.values()):
            probe.kill()
            probe.wait()

    def signs(self) -> tuple[LinkSign, ...]:
        now = self.clock()
        fresh = {
            node: line for node, (when, line) in self.lines.items() if now - when < OLD_S
        }  # fmt: skip
        pings = (
            fresh[self.ends[0].node]["peers"] if self.ends and self.ends[0].node in fresh else {}
        )
        return tuple(_sign(end, fresh.get(end.node, {}), pings) for end in self.ends)

    def check(self) -> None:
        """Raise `LaunchFailedError` when a link is away for `LIMIT_S`; asked while ranks start."""
        lost = [link for link in self.signs() if is_down(link)]
        now = self.clock()
        if not lost:
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = now
        elif now - self.lost_since >= LIMIT_S:
            raise LaunchFailedError(*map(_lost, lost))

    def _follow(self, end: End, peers: Sequence[str]) -> None:
        request = json.dumps({"address": end.address, "nic": end.nic, "peers": list(peers)})
        while not self.closed.is_set():
            with suppress(OSError):
                self._probe(end, request)
            self.closed.wait(AGAIN_S)

    def _probe(self, end: End, request: str) -> None:
        probe = subprocess.Popen(
            end.shell.argv(["python3", "-u", "-", request]), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.running[end.node] = probe
        if self.closed.is_set():
            probe.kill()
        assert probe.stdin is not None and probe.stdout is not None
        with suppress(OSError):
            probe.stdin.write(Path(program.__file__).read_text())
            probe.stdin.close()
        for text in probe.stdout:
            with suppress(ValueError):
                self.lines[end.node] = (self.clock(), json.loads(text))
        probe.wait()


def _sign(end: End, line: Mapping[str, Any], pings: Mapping[str, bool | None]) -> LinkSign:
    nic = line.get("nic") or end.nic or "fabric device"
    counters = f"carrier changes {line['changes']}, errors {line['errors']}" if line else "no news"
    return LinkSign(
        end.node, line.get("carrier"), pings.get(end.address), f"{nic} {end.address}, {counters}"
    )


def _lost(link: LinkSign) -> Finding:
    return Finding(
        "link-down",
        f"{link.node}: {link.detail} has no link while the ranks start",
        "the ranks cannot meet",
        "check cable and switch; the start is repeated once the link is back",
    )
