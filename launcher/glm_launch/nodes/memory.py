"""Will it fit? Predict memory per node before loading, and stop a load that will not.

Pure. A GB10 has one memory for host and GPU and does not run out of it: it freezes. So the
prediction is compared with MemAvailable before anything is loaded, and while loading a sample per
second is compared with a floor. On cards with memory of their own both are judged apart. The
numbers that are not arithmetic are in `Reserve`, filled from config/hardware, each with its source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from glm_launch.errors import Finding
from glm_launch.nodes.facts import NodeFacts

GIB = 2**30


@dataclass(frozen=True)
class Demand:
    """What the model asks of one rank, in bytes."""

    weights: int
    drafter: int
    kv_cache: int

    @property
    def total(self) -> int:
        return self.weights + self.drafter + self.kv_cache


@dataclass(frozen=True)
class Reserve:
    """What a rank needs beside model and cache, in bytes."""

    workspace: int = 4 * GIB
    context: int = 1 * GIB
    head_extra: int = int(1.8 * GIB)
    host: int = 4 * GIB
    floor: int = 6 * GIB


@dataclass(frozen=True)
class Prediction:
    """Bytes needed and available, `parts` in the order in which they are said."""

    node: str
    pool: str
    needed: int
    available: int
    parts: tuple[tuple[str, int], ...]

    @property
    def short(self) -> int:
        return max(0, self.needed - self.available)


def demand(
    model_bytes: int, drafter_bytes: int, kv_bytes: int, *, ranks: int, draft_ranks: int = 0
) -> Demand:
    """The share of one rank: weights are cut, the KV cache of MLA is on every rank in full."""
    return Demand(
        weights=-(-model_bytes // ranks),
        drafter=-(-drafter_bytes // (draft_ranks or ranks)),
        kv_cache=kv_bytes,
    )


def predict(
    facts: NodeFacts, need: Demand, reserve: Reserve, *, head: bool, ranks_here: int = 1
) -> list[Prediction]:
    """One prediction per pool of memory of this node."""
    extra = reserve.head_extra if head else 0
    device = (
        ("weights", need.weights), ("drafter", need.drafter), ("KV cache", need.kv_cache),
        ("workspace", reserve.workspace), ("context", reserve.context),
    )  # fmt: skip
    unified = not facts.gpus or facts.gpus[0].unified
    if unified:
        scaled = tuple((name, size * ranks_here) for name, size in device)
        parts = (*scaled, ("API server", extra), ("floor", reserve.floor))
        return [_prediction(facts.host, "memory", facts.memory.available, parts)]
    found = [
        _prediction(facts.host, f"GPU {gpu.index}", free_bytes(gpu_bytes, gpu.processes), device)
        for gpu in facts.gpus[:ranks_here]
        if (gpu_bytes := gpu.memory_bytes) is not None
    ]
    host = (("loading", reserve.host * ranks_here), ("API server", extra))
    return [*found, _prediction(facts.host, "host memory", facts.memory.available, host)]


def free_bytes(total: int, processes: Iterable[object]) -> int:
    """Memory of a device without what other processes hold, as far as the driver says."""
    return total - sum(getattr(process, "memory_bytes", None) or 0 for process in processes)


def _prediction(
    node: str, pool: str, available: int, parts: tuple[tuple[str, int], ...]
) -> Prediction:
    return Prediction(node, pool, sum(size for _, size in parts), available, parts)


def findings(predictions: Sequence[Prediction]) -> list[Finding]:
    """What does not fit, with the knob and by how much to lower it."""
    return [
        Finding(
            "too-little-memory",
            f"{one.node}: {one.pool} would need {gib(one.needed)}, {gib(one.available)} are free "
            f"({', '.join(f'{name} {gib(size)}' for name, size in one.parts if size)})",
            "unified memory freezes instead of failing, and the machine has to be reset",
            _advice(one),
        )
        for one in predictions
        if one.short
    ]


def _advice(one: Prediction) -> str:
    cache = dict(one.parts).get("KV cache", 0)
    if one.short <= cache * 3 // 4:
        return f"set KV_CACHE_MEMORY_BYTES to {cache - one.short} or less, and lower MAX_MODEL_LEN"
    return (
        f"free {gib(one.short)} on {one.node} (other containers, page cache, desktop), "
        "add a node, or use weights with fewer bits"
    )


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def below_floor(samples: Iterable[int], floor: int, *, in_a_row: int = 2) -> int | None:
    """The sample at which a load must stop: `in_a_row` readings below the floor, else None."""
    low = 0
    for sample in samples:
        low = low + 1 if sample < floor else 0
        if low >= in_a_row:
            return sample
    return None


def aborted(node: str, available: int, floor: int) -> Finding:
    """Why a load was stopped."""
    return Finding(
        "memory-floor",
        f"{node}: {gib(available)} left while loading, the floor is {gib(floor)}",
        "below it a machine with unified memory freezes",
        "lower KV_CACHE_MEMORY_BYTES or MAX_MODEL_LEN, or stop what else uses memory there",
    )
