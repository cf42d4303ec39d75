"""Typed records of a measurement: a number always travels with its protocol, machine and date."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from glm_bench.coherence import Symptom

SCHEMA = 1


@dataclass(frozen=True)
class Machine:
    """Where the client ran; for a server elsewhere this says nothing about the server."""

    system: str
    cpu: str
    cores: int
    memory_gib: float
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One request of one client. Times in seconds or milliseconds as named."""

    prompt: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    ttft_s: float
    decode_s: float
    tokens_per_s: float
    itl_p50_ms: float
    itl_p95_ms: float
    symptoms: tuple[Symptom, ...] = ()


@dataclass(frozen=True)
class Drafting:
    """What the server drafted during all runs; `step_ms` is decode time per draft round."""

    drafts: int
    acceptance: float
    acceptance_per_position: tuple[float, ...]
    tokens_per_step: float
    step_ms: float


@dataclass(frozen=True)
class Report:
    """A decode measurement."""

    date: str
    machine: Machine
    base_url: str
    model: str
    prompts: str
    max_tokens: int
    temperature: float
    ignore_eos: bool
    coherence_checked: bool
    runs: tuple[Run, ...]
    tokens_per_s: float
    ttft_s: float
    itl_p50_ms: float
    drafting: Drafting | None

    @property
    def is_coherent(self) -> bool:
        return not any(run.symptoms for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "kind": "decode", **asdict(self)}

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n")


def timestamp() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def this_machine() -> Machine:
    """The machine of the client, read from the kernel."""
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [_value(gpu, "Model") for gpu in gpus]
    memory = _value(Path("/proc/meminfo"), "MemTotal").removesuffix("kB").strip() or "0"
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        cpu=_value(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(int(memory) / 2**20, 1),
        gpus=tuple(names),
    )


def _value(path: Path, key: str) -> str:
    """The value behind `key :` in a file of the kernel; empty when absent."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() == key), "")
