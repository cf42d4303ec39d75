"""What `plugin.register()` leaves behind for the moment a model is really built.

Registration runs in every process of vLLM, long before ranks know each other, and vLLM may go on
without a plugin that failed. So registration only records: its failure (raised again at every use),
this rank's digest (compared between ranks before weights are read) and work that must wait until a
model class is about to be built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from glm_exl3 import envs
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.log import logger

_log = logger(__name__)


@dataclass(frozen=True)
class Digest:
    """What must be equal on all ranks, as (name, value) pairs in a fixed order."""

    entries: tuple[tuple[str, str], ...]

    def differences(self, other: Digest) -> tuple[str, ...]:
        """`name: ours / theirs` for every entry that differs."""
        ours, theirs = dict(self.entries), dict(other.entries)
        return tuple(
            f"{name}: {ours.get(name, 'absent')} / {theirs.get(name, 'absent')}"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        )

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.entries)


@dataclass
class _State:
    failure: BaseException | None = None
    digest: Digest | None = None
    hooks: list[Callable[[], None]] = field(default_factory=list)


_state = _State()


def record_failure(error: BaseException) -> None:
    """Remember why registration failed."""
    _state.failure = error


def raise_failure() -> None:
    """Raise the failure of registration, if there was one, with the original error as its cause."""
    if _state.failure is not None:
        raise GlmExl3Error(
            code="plugin",
            seen=f"the plugin did not start: {_state.failure}",
            why="vLLM carries on without a plugin that failed and would misread the weights",
            fix="correct the cause; python -m glm_exl3.doctor shows the same failure",
        ) from _state.failure


def set_digest(value: Digest) -> None:
    _state.digest = value


def digest() -> Digest | None:
    """This rank's digest, once registration has made it."""
    return _state.digest


def before_model(hook: Callable[[], None]) -> None:
    """Run `hook` once, when the first model class of this process is about to be built."""
    _state.hooks.append(hook)


def prepare_model() -> None:
    """Run what waited for a model: called by every model override before it builds anything."""
    raise_failure()
    while _state.hooks:
        _state.hooks.pop(0)()


def compare_digests(group: Any) -> None:
    """Compare this rank's digest with all ranks of vLLM's group coordinator `group`.

    Every rank waits at most GLM_EXL3_JOIN_TIMEOUT_S for the others. Raises GlmExl3Error on every
    rank when one is missing or differs, so all of them stop.
    """
    own = _state.digest
    if own is None:
        return
    _log.info("rank %d of %d: %s", group.rank_in_group, group.world_size, own)
    if group.world_size == 1:
        return
    import torch.distributed as dist

    timeout_s = envs.JOIN_TIMEOUT_S.read()
    try:
        dist.monitored_barrier(group.cpu_group, timedelta(seconds=timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        raise GlmExl3Error(
            code="ranks",
            seen=f"not all {group.world_size} ranks reached the comparison within {timeout_s:g} s: "
            f"{error}",
            why="a rank without this plugin, or one that died, cannot serve its share",
            fix="look at the log of that rank; every node needs the same image and settings",
        ) from error
    gathered: list[Digest | None] = [None] * group.world_size
    dist.all_gather_object(gathered, own, group=group.cpu_group)
    check_equal([entry for entry in gathered if entry is not None])


def check_equal(digests: list[Digest]) -> None:
    """Raise GlmExl3Error naming the ranks and entries that differ from rank 0."""
    differences = [
        f"rank {rank}: {', '.join(found)}"
        for rank, digest in enumerate(digests)
        if (found := digests[0].differences(digest))
    ]
    if differences:
        raise GlmExl3Error(
            code="ranks",
            seen=f"ranks differ from rank 0 (rank 0 / other): {'; '.join(differences)}",
            why="ranks with different code compute different numbers and may hang",
            fix="start every rank from the same image with the same settings",
        )
