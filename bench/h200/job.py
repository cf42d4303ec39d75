"""What a job is: one command with its environment, place and time limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WHOLE_GPU_GIB = 130  # what an engine of vLLM takes unless it is told otherwise


@dataclass(frozen=True)
class Job:
    """One command of the table.

    `command` and `env` know {python}, {out} (folder of results), {work} (scratch, kept between
    calls), {root} (the repository), {name}, {port} and {files} (what was carried along). `gpus` 0
    runs on the CPU beside everything; `exclusive` jobs are timings and have their GPUs alone,
    others share one as long as their `gib` fit. Smaller `priority` starts first. `needs` are jobs
    that must have succeeded, `after` such that must have ended somehow. `data` is written to
    {out}/{name}.job.json before the start. `quick` starts engines without vLLM's warm-up of all
    shapes. Without a `vital` job nothing is worth its time: when it fails, all ends.
    """

    name: str
    command: tuple[str, ...]
    expect_s: int
    limit_s: int
    priority: int
    gpus: int = 1
    exclusive: bool = True
    gib: int = WHOLE_GPU_GIB
    env: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    data: Mapping[str, Any] | None = None
    quick: bool = True
    after: tuple[str, ...] = ()
    vital: bool = False


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """A command that runs a module."""
    return ("{python}", "-m", module, *arguments)
