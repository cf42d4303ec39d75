"""Look at every node's available memory once a second while weights are read, and stop in time.

A machine with unified memory freezes when it runs out. So a probe on each node prints MemAvailable
every second, and `check` raises as soon as a node stayed below its floor for two samples. What must
stay true: no probe outlives the block; a node that stops answering is not an error here, since its
container is watched as well.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from glm_launch.errors import LaunchFailedError
from glm_launch.nodes import memory
from glm_launch.nodes.probes import memory as program
from glm_launch.nodes.ssh import Shell


@dataclass
class MemoryWatch:
    """The latest readings in bytes, by node."""

    floors: Mapping[str, int]
    samples: dict[str, list[int]] = field(default_factory=dict)

    def take(self, node: str, available: int) -> None:
        self.samples.setdefault(node, []).append(available)

    def check(self) -> None:
        """Raise `LaunchFailedError` for every node that is below its floor."""
        found = []
        for node, readings in self.samples.items():
            low = memory.below_floor(readings[-8:], self.floors[node])
            if low is not None:
                found.append(memory.aborted(node, low, self.floors[node]))
        if found:
            raise LaunchFailedError(*found)

    def lowest(self) -> dict[str, int]:
        """The smallest reading of every node."""
        return {node: min(readings) for node, readings in self.samples.items()}


@contextmanager
def watching(
    shells: Sequence[tuple[str, Shell]], floors: Mapping[str, int]
) -> Iterator[MemoryWatch]:
    """Sample inside; nodes without a floor are left alone."""
    watch = MemoryWatch({node: floor for node, floor in floors.items() if floor})
    probes = []
    try:
        for node, shell in shells:
            if watch.floors.get(node):
                probe = _start(shell)
                probes.append(probe)
                threading.Thread(target=_read, args=(probe, node, watch), daemon=True).start()
        yield watch
    finally:
        for probe in probes:
            probe.kill()
            probe.wait()


def _start(shell: Shell) -> subprocess.Popen[str]:
    probe = subprocess.Popen(
        shell.argv(["python3", "-u", "-"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert probe.stdin is not None
    with suppress(OSError):
        probe.stdin.write(Path(program.__file__).read_text())
        probe.stdin.close()
    return probe


def _read(probe: subprocess.Popen[str], node: str, watch: MemoryWatch) -> None:
    assert probe.stdout is not None
    for line in probe.stdout:
        if line.strip().isdigit():
            watch.take(node, int(line))
