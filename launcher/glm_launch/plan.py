"""Settings and facts become a `LaunchPlan`: what to run, where, in which order.

Pure: the same input gives the same plan, and nothing here looks at the machine or starts anything.
`plan` prints it, tests hold snapshots of it, a `Runner` carries it out. It serialises to JSON
(`as_json`, schema 1) without secrets: `secret_env` only names the variables that the runner must
hand to a rank, so no key can reach an argument list, a log or a state file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from glm_exl3.format.kv import VLLM_NAMES, registered_layout
from glm_launch import draft_lengths, kv_arguments
from glm_launch.errors import ConfigurationError, Finding, raise_if_any
from glm_launch.facts import Facts
from glm_launch.settings import Settings

SCHEMA = 1
PARSER = "glm47"


@dataclass(frozen=True)
class Box:
    """What the container of a node is made of; mounts are (source, target), all read-only."""

    image: str
    mounts: tuple[tuple[str, str], ...] = ()
    gpus: str = ""
    rdma: bool = False
    shm_size: str = "16gb"
    owner: str = ""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Box:
        mounts = tuple((str(source), str(target)) for source, target in value["mounts"])
        return cls(**{**value, "mounts": mounts})


@dataclass(frozen=True)
class RankPlan:
    """One rank: `argv` and `env` are complete except for the variables named in `secret_env`.

    With a `box` it is a container on the node that ssh knows as `ssh`; empty: on this machine.
    """

    rank: int
    role: str
    node: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    secret_env: tuple[str, ...] = ()
    ssh: str = ""
    box: Box | None = None

    @property
    def name(self) -> str:
        return f"rank{self.rank}"


@dataclass(frozen=True)
class LaunchPlan:
    """All ranks in the order of their numbers; `start_order` holds those numbers, workers first.

    `edits` says in words how the model is changed in memory; empty: not at all.
    """

    runtime: str
    model: str
    served_name: str
    drafting: str
    base_url: str
    api_host: str
    port: int
    master_addr: str
    master_port: int
    ranks: tuple[RankPlan, ...]
    start_order: tuple[int, ...]
    ready_timeout_s: int
    stop_grace_s: int
    warnings: tuple[str, ...] = ()
    edits: str = ""

    def as_json(self) -> dict[str, Any]:
        ranks = [asdict(rank) | {"env": dict(rank.env)} for rank in self.ranks]
        value = {"schema": SCHEMA, **asdict(self), "ranks": ranks, "digest": self.digest}
        return {key: one for key, one in value.items() if key != "edits" or one}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LaunchPlan:
        """The plan that `as_json` wrote."""
        known = {field.name: value[field.name] for field in fields(cls) if field.name in value}
        ranks = (
            RankPlan(
                **rank
                | {
                    "argv": tuple(rank["argv"]),
                    "env": tuple(sorted(rank["env"].items())),
                    "secret_env": tuple(rank["secret_env"]),
                    "box": Box.from_json(rank["box"]) if rank.get("box") else None,
                }
            )
            for rank in value["ranks"]
        )
        order = tuple(value["start_order"])
        warnings = tuple(value["warnings"])
        return cls(**known | {"ranks": tuple(ranks), "start_order": order, "warnings": warnings})

    @property
    def digest(self) -> str:
        """Short hash of what runs; equal plans have equal digests."""
        text = json.dumps([asdict(rank) for rank in self.ranks], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def build(settings: Settings, facts: Facts) -> LaunchPlan:
    """The plan of a launch; raises `ConfigurationError` when a setting it needs is empty."""
    raise_if_any(ConfigurationError, missing(settings))
    numbers = range(settings.RANKS)
    return LaunchPlan(
        runtime=settings.runtime,
        model=settings.MODEL,
        served_name=settings.SERVED_MODEL_NAME,
        drafting=settings.SPEC_METHOD,
        base_url=settings.base_url,
        api_host=settings.API_HOST,
        port=settings.PORT,
        master_addr=settings.HEAD_IP,
        master_port=settings.MASTER_PORT,
        ranks=tuple(_rank(number, settings, facts) for number in numbers),
        start_order=(*numbers[1:], 0),
        ready_timeout_s=settings.READY_TIMEOUT_S,
        stop_grace_s=settings.STOP_GRACE_S,
        warnings=_warnings(settings, facts),
    )


def missing(settings: Settings) -> list[Finding]:
    """Settings that must not be empty for a launch."""
    found = []
    if not settings.MODEL:
        found.append(
            Finding(
                "no-model",
                "MODEL is empty",
                "there is nothing to serve",
                "set MODEL to the folder of an EXL3 checkpoint, or try ./start.sh demo",
            )
        )
    if settings.SPEC_METHOD == "dflash" and not settings.DFLASH_MODEL:
        found.append(
            Finding(
                "no-drafter",
                "SPEC_METHOD=dflash and DFLASH_MODEL is empty",
                "DFlash2 drafts with a model of its own",
                "set DFLASH_MODEL to its folder, or SPEC_METHOD=mtp or none",
            )
        )
    return found


def _rank(number: int, settings: Settings, facts: Facts) -> RankPlan:
    head = number == 0
    argv = [*facts.engine, "serve", settings.MODEL, *_shared_arguments(settings, facts)]
    argv += _node_arguments(number, settings)
    argv += _head_arguments(settings) if head else ["--headless"]
    argv += settings.EXTRA_ARGS
    return RankPlan(
        rank=number,
        role="head" if head else "worker",
        node=settings.HEAD_IP,
        argv=tuple(argv),
        env=tuple(sorted(_environment(number, settings, facts).items())),
        secret_env=tuple(settings.secrets()) if head else (),
    )


def _shared_arguments(settings: Settings, facts: Facts) -> list[str]:
    """Arguments that must be the same on every rank."""
    pairs: list[tuple[str, object]] = [
        ("--revision", settings.MODEL_REVISION),
        ("--max-model-len", settings.MAX_MODEL_LEN),
        ("--max-num-seqs", settings.MAX_NUM_SEQS),
        ("--max-num-batched-tokens", settings.MAX_NUM_BATCHED_TOKENS),
        ("--kv-cache-dtype", _cache_type(settings)),
        *kv_arguments.of(settings),
        ("--limit-mm-per-prompt", json.dumps(settings.LIMIT_MM) if settings.LIMIT_MM else ""),
        ("--speculative-config", json.dumps(spec) if (spec := _speculation(settings)) else ""),
    ]
    if facts.gpus:
        pairs += [
            ("--gpu-memory-utilization", settings.GPU_MEM_UTIL),
            ("--kv-cache-memory-bytes", settings.KV_CACHE_MEMORY_BYTES),
        ]
    argv = [text for flag, value in pairs if value for text in (flag, str(value))]
    if settings.ENFORCE_EAGER or not facts.gpus:
        argv.append("--enforce-eager")
    elif settings.CUDAGRAPH_SIZES:
        argv += ["--cudagraph-capture-sizes", *map(str, settings.CUDAGRAPH_SIZES)]
    if settings.REPLY_ACCEPTANCE and settings.SPEC_METHOD != "none":
        argv += ["--per-request-spec-decode-metrics", "summary"]
    argv += draft_lengths.arguments(settings)
    argv += ["--language-model-only"] if settings.LANGUAGE_MODEL_ONLY else []
    argv += ["--skip-mm-profiling"] if settings.SKIP_MM_PROFILING else []
    return argv


def _cache_type(settings: Settings) -> str:
    """vLLM's name for the rows, empty for its own choice."""
    chosen = settings.KV_CACHE_DTYPE
    return "" if chosen == "auto" else VLLM_NAMES[chosen]


def _speculation(settings: Settings) -> dict[str, object]:
    if settings.SPEC_METHOD == "mtp":
        return {"method": "mtp", **draft_lengths.configuration(settings)}
    if settings.SPEC_METHOD == "none":
        return {}
    drafter: dict[str, object] = {
        "method": "dflash",
        "model": settings.DFLASH_MODEL,
        **draft_lengths.configuration(settings),
    }
    if settings.DFLASH_REVISION:
        drafter["revision"] = settings.DFLASH_REVISION
    if settings.DFLASH_DRAFT_TP:
        drafter["draft_tensor_parallel_size"] = settings.DFLASH_DRAFT_TP
    if settings.DRAFT_KV_CACHE_DTYPE != "auto" or registered_layout(_cache_type(settings)):
        drafter["kv_cache_dtype"] = settings.DRAFT_KV_CACHE_DTYPE
    return drafter


def _node_arguments(number: int, settings: Settings) -> list[str]:
    """Where this rank stands among the others; every rank is a node with one device."""
    if settings.RANKS == 1:
        return []
    pairs: Mapping[str, object] = {
        "--tensor-parallel-size": settings.RANKS,
        "--distributed-executor-backend": "mp",
        "--nnodes": settings.RANKS,
        "--node-rank": number,
        "--master-addr": settings.HEAD_IP,
        "--master-port": settings.MASTER_PORT,
    }
    return [text for flag, value in pairs.items() for text in (flag, str(value))]


def _head_arguments(settings: Settings) -> list[str]:
    return [
        *("--host", settings.API_HOST, "--port", str(settings.PORT)),
        *("--served-model-name", settings.SERVED_MODEL_NAME),
        *("--reasoning-parser", PARSER, "--tool-call-parser", PARSER),
        "--enable-auto-tool-choice",
    ]


def _environment(number: int, settings: Settings, facts: Facts) -> dict[str, str]:
    env = {
        "DO_NOT_TRACK": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "VLLM_HOST_IP": settings.HEAD_IP,
        "VLLM_NO_USAGE_STATS": "1",
    }
    if settings.INDEXER_WORKSPACE_MB:
        env[kv_arguments.INDEXER_LIMIT] = str(settings.INDEXER_WORKSPACE_MB)
    if settings.HF_HOME:
        env["HF_HOME"] = settings.HF_HOME
    env |= draft_lengths.environment(settings)
    if facts.gpus:
        return env | {"CUDA_VISIBLE_DEVICES": str(number)}
    cores = cores_of(number, settings, facts)
    return env | {
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(settings.CPU_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }


def cores_of(number: int, settings: Settings, facts: Facts) -> tuple[int, ...]:
    """The cores of one rank: even shares, none shared while there are enough."""
    count = len(facts.cores)
    share = min(settings.CPU_THREADS or max(1, count // settings.RANKS), count)
    return tuple(sorted({facts.cores[(number * share + i) % count] for i in range(share)}))


def _warnings(settings: Settings, facts: Facts) -> tuple[str, ...]:
    notes = draft_lengths.notes(settings)
    if facts.gpus or len(facts.cores) >= settings.RANKS:
        return notes
    return (
        *notes,
        f"{settings.RANKS} ranks share {len(facts.cores)} core(s): this will be slow",
    )
