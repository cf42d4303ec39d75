"""Checks before a launch: everything that is wrong, at once, each with its fix. Changes nothing."""

from __future__ import annotations

from pathlib import Path

from glm_launch import checkpoint, ports
from glm_launch.errors import Finding
from glm_launch.facts import Facts
from glm_launch.plan import LaunchPlan
from glm_launch.settings import Settings

GIB = 2**30


def check(settings: Settings, facts: Facts, plan: LaunchPlan) -> list[Finding]:
    """All findings; empty when the launch may go on."""
    return [
        *check_engine(facts),
        *check_devices(settings, facts),
        *check_port("PORT", plan.api_host, plan.port),
        *check_meeting_point(plan),
        *check_memory(settings, facts),
        *check_models(settings),
    ]


def check_engine(facts: Facts) -> list[Finding]:
    if facts.engine and (len(facts.engine) > 1 or Path(facts.engine[0]).exists()):
        return []
    seen = f"no such file: {facts.engine[0]}" if facts.engine else "vLLM is not installed"
    return [
        Finding(
            "no-engine",
            seen,
            "RUNTIME=local runs the `vllm` of this environment",
            "./start.sh demo installs the CPU engine; or set ENGINE_COMMAND to a vLLM 0.33.0",
        )
    ]


def check_devices(settings: Settings, facts: Facts) -> list[Finding]:
    if not facts.gpus or facts.gpus >= settings.RANKS:
        return []
    return [
        Finding(
            "too-few-gpus",
            f"RANKS={settings.RANKS} and {facts.gpus} GPU(s)",
            "every rank needs a GPU of its own",
            f"set RANKS={1 if facts.gpus < 2 else 2}",
        )
    ]


def check_meeting_point(plan: LaunchPlan) -> list[Finding]:
    """A single rank meets nobody."""
    if len(plan.ranks) == 1:
        return []
    return check_port("MASTER_PORT", plan.master_addr, plan.master_port)


def check_port(key: str, host: str, port: int) -> list[Finding]:
    if ports.is_free(host, port):
        return []
    other = ports.next_free(host, port)
    return [
        Finding(
            "port-in-use",
            f"{key}={port} on {host} cannot be bound; it belongs to {ports.owner(port)}",
            "the ranks need it",
            f"stop that process, or set {key}={other}" if other else "stop that process",
        )
    ]


def check_memory(settings: Settings, facts: Facts) -> list[Finding]:
    needed = settings.RANKS * settings.CPU_KV_GIB * GIB
    if facts.gpus or not facts.memory_available_bytes or needed < facts.memory_available_bytes:
        return []
    return [
        Finding(
            "too-little-memory",
            f"{facts.memory_available_bytes / GIB:.1f} GiB are available, the KV cache alone takes "
            f"{needed / GIB:.0f} GiB",
            "the machine would run out of memory while loading",
            "lower CPU_KV_GIB or RANKS",
        )
    ]


def check_models(settings: Settings) -> list[Finding]:
    found = checkpoint.check("MODEL", Path(settings.MODEL))
    if settings.SPEC_METHOD == "dflash":
        found += checkpoint.check("DFLASH_MODEL", Path(settings.DFLASH_MODEL))
    return found
