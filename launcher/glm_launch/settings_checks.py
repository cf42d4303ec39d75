"""Combinations of settings that no single field can see. Pure: settings in, findings out."""

from __future__ import annotations

from glm_launch import dense, draft_lengths, edits_checks
from glm_launch.errors import Finding
from glm_launch.nodes import ray_cluster
from glm_launch.settings import Settings, is_loopback

TENSOR_PARALLEL = (1, 2, 4)


def cross_checks(settings: Settings, key_path: str) -> list[Finding]:
    """Everything that does not go together; `key_path` is where `key` would put a key."""
    found = [*_api(settings, key_path), *_ports(settings), *_drafter(settings)]
    found += draft_lengths.findings(settings)
    found += ray_cluster.findings(settings)
    found += [*edits_checks.ablit(settings), *edits_checks.steering(settings)]
    found += dense.findings(settings)
    return found + (_nodes(settings) if settings.runtime == "containers" else _local(settings))


def _api(settings: Settings, key_path: str) -> list[Finding]:
    if is_loopback(settings.API_HOST) or settings.VLLM_API_KEY or settings.ALLOW_OPEN_API:
        return []
    return [
        Finding(
            "open-api",
            f"API_HOST={settings.API_HOST} without VLLM_API_KEY or VLLM_API_KEY_FILE",
            "anybody on that network could use the model and read its metrics",
            "run the first line and put the second into .env (ALLOW_OPEN_API=1 goes without)\n"
            "    ./start.sh key\n"
            f"    VLLM_API_KEY_FILE={key_path}",
        )
    ]


def _ports(settings: Settings) -> list[Finding]:
    names = ["PORT", "MASTER_PORT"]
    names += ["WATCH_PORT"] if settings.runtime == "containers" else []
    found = []
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            if getattr(settings, first) == getattr(settings, second):
                found.append(
                    Finding(
                        "same-port",
                        f"{first} and {second} are both {getattr(settings, first)}",
                        "each of them needs a port of its own",
                        "change one of them",
                    )
                )
    return found


def _drafter(settings: Settings) -> list[Finding]:
    found = []
    ranks = settings.tensor_parallel
    if settings.DFLASH_DRAFT_TP not in (0, ranks):
        said = "RANKS" if settings.runtime == "local" else "tensor parallelism "
        found.append(
            Finding(
                "draft-tp",
                f"DFLASH_DRAFT_TP={settings.DFLASH_DRAFT_TP} with {said}={ranks}",
                "vLLM 0.33 cuts a DFlash drafter over all ranks, whatever was asked for",
                f"use 0 or {ranks}",
            )
        )
    tokens, name = drafted(settings)
    room = settings.MAX_NUM_BATCHED_TOKENS
    if tokens and room and room <= tokens + 1:
        found.append(
            Finding(
                "draft-room",
                f"MAX_NUM_BATCHED_TOKENS={room} with {name}={tokens}",
                "one request alone verifies its newest token and all drafts in a step",
                f"use at least {tokens + 2}, better thousands, or fewer drafts",
            )
        )
    missing = ungraphed(settings)
    if missing:
        sizes = ",".join(map(str, sorted({length + 1 for length in lengths(settings)})))
        said = "ADAPTIVE_K_SET" if draft_lengths.adaptive(settings) else name
        found.append(
            Finding(
                "draft-graphs",
                f"CUDAGRAPH_SIZES={','.join(map(str, settings.CUDAGRAPH_SIZES))} with "
                f"{said} and MAX_NUM_SEQS={settings.MAX_NUM_SEQS}",
                "vLLM rounds every size up to whole requests, drops it beyond the largest, and "
                f"has no graph left for steps of {', '.join(map(str, missing))} drafts",
                f"use {sizes} and their multiples, or leave CUDAGRAPH_SIZES empty",
            )
        )
    return found


def drafted(settings: Settings) -> tuple[int, str]:
    """Most drafts a step verifies, and the setting that says so; 0 without drafting."""
    own = draft_lengths.drafter_tokens(settings)
    name = {"dflash": "DFLASH_TOKENS", "mtp": "MTP_TOKENS"}.get(settings.SPEC_METHOD, "")
    most = draft_lengths.verified_tokens(settings)
    return (most, "HYBRID_DRAFT_TOKENS") if most > own else (own, name)


def lengths(settings: Settings) -> tuple[int, ...]:
    """Every number of drafts that a step may verify; none without drafting."""
    most, _ = drafted(settings)
    if not most:
        return ()
    return settings.ADAPTIVE_K_SET if draft_lengths.adaptive(settings) else (most,)


def ungraphed(settings: Settings) -> list[int]:
    """Numbers of drafts whose steps none of `CUDAGRAPH_SIZES` gives a CUDA graph.

    The rule of vLLM's `CudaGraphManager._init_candidates`.
    """
    sizes = settings.CUDAGRAPH_SIZES
    if not sizes or settings.ENFORCE_EAGER:
        return []

    def captured(query: int) -> bool:
        requests = [-(-size // query) for size in sizes]
        return any(n * query <= max(sizes) and n <= settings.MAX_NUM_SEQS for n in requests)

    return [length for length in lengths(settings) if not captured(length + 1)]


def _local(settings: Settings) -> list[Finding]:
    if not settings.WORKER_IP:
        return []
    return [
        Finding(
            "remote-nodes",
            f"WORKER_IP={','.join(settings.WORKER_IP)} with RUNTIME=local",
            "RUNTIME=local starts every rank on this machine",
            "leave RUNTIME empty, or WORKER_IP: RANKS says how many ranks to start here",
        )
    ]


def _nodes(settings: Settings) -> list[Finding]:
    found = []
    workers = len(settings.WORKER_IP)
    ranks = settings.tensor_parallel
    if ranks not in TENSOR_PARALLEL:
        allowed = ", ".join(map(str, TENSOR_PARALLEL))
        found.append(
            Finding(
                "bad-tensor-parallel",
                f"{settings.nodes} node(s) with GPUS_PER_NODE={settings.GPUS_PER_NODE} make "
                f"tensor parallelism {ranks}",
                "64 heads and expert width 2048 are cut evenly, in blocks of 128",
                f"the tensor parallelism may be {allowed}"
                + ("; leave one node out" if settings.nodes == 3 else ""),
            )
        )
    if workers and is_loopback(settings.HEAD_IP):
        found.append(
            Finding(
                "head-address",
                f"HEAD_IP={settings.HEAD_IP} with WORKER_IP={','.join(settings.WORKER_IP)}",
                "the workers reach the head at that address",
                "set HEAD_IP to this machine's address on the network between the nodes",
            )
        )
    addresses = (settings.HEAD_IP, *settings.WORKER_IP)
    if len(set(addresses)) < len(addresses):
        found.append(
            Finding(
                "same-address",
                f"HEAD_IP and WORKER_IP name one address twice: {', '.join(addresses)}",
                "every node runs one container",
                "name every node once",
            )
        )
    for name in ("WORKER_SSH", "WORKER_CX7_IF", "WORKER_CX7_IB"):
        given = len(getattr(settings, name))
        single = name != "WORKER_SSH" and given == 1
        if given and given != workers and not single:
            found.append(
                Finding(
                    "wrong-count",
                    f"{name} names {given}, WORKER_IP {workers}",
                    "they belong together in this order",
                    f"name {workers}, or leave {name} empty",
                )
            )
    if settings.BUILD and "@" in settings.IMAGE:
        found.append(
            Finding(
                "build-by-digest",
                f"BUILD=1 with IMAGE={settings.IMAGE}",
                "a digest names an image that exists already",
                "leave BUILD empty, or give IMAGE a name and a tag",
            )
        )
    return found
