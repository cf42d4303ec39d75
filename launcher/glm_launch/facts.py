"""What the plan needs to know about this machine, gathered once and passed on as a value."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from glm_launch.settings import Settings


@dataclass(frozen=True)
class Facts:
    """Facts of one host.

    `cores` are the ids this process may use, `gpus` counts NVIDIA devices, `engine` is the command
    in front of `serve` (empty when no engine is installed), `memory_available_bytes` is
    MemAvailable (0 where unknown).
    """

    cores: tuple[int, ...]
    gpus: int
    engine: tuple[str, ...]
    memory_available_bytes: int = 0


def gather(settings: Settings) -> Facts:
    """Read the facts of this machine; nothing is changed and nothing is started."""
    return Facts(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        engine=settings.ENGINE_COMMAND or find_engine(),
        memory_available_bytes=memory_available_bytes(),
    )


def find_engine() -> tuple[str, ...]:
    """The `vllm` beside this Python, else the one on PATH, else nothing."""
    beside = Path(sys.executable).with_name("vllm")
    if beside.is_file():
        return (str(beside),)
    found = shutil.which("vllm")
    return (found,) if found else ()


def memory_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable of the kernel in bytes, or 0."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
