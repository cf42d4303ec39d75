"""Which job starts next, and where: decisions without effects.

A timing has its GPUs alone; other jobs share a GPU while their memory fits. Jobs of two GPUs wait
for both, and nothing longer than the wait starts meanwhile. A job whose expected time does not fit
into what is left of the budget does not start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from h200.job import WHOLE_GPU_GIB, Job

MOST_BESIDE = 4  # jobs that share a GPU
CPU_JOBS = 4


@dataclass(frozen=True)
class Running:
    """A job at work: its GPUs and the second at which it should be done."""

    job: Job
    gpus: tuple[int, ...]
    until_s: float


@dataclass(frozen=True)
class State:
    """What the runner knows: seconds since the start, and all jobs by what became of them."""

    now_s: float
    budget_s: float
    gpus: tuple[int, ...]
    running: tuple[Running, ...] = ()
    succeeded: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()


def takes(job: Job, gpu: int, running: Sequence[Running]) -> bool:
    """Whether `gpu` has room for `job` beside what runs there."""
    there = [one.job for one in running if gpu in one.gpus]
    if job.exclusive or any(other.exclusive for other in there):
        return not there
    fits = sum(other.gib for other in there) + job.gib <= WHOLE_GPU_GIB
    return fits and len(there) < MOST_BESIDE


def place(job: Job, state: State) -> tuple[int, ...] | None:
    """GPUs for `job` now, or None."""
    if job.gpus == 0:
        beside = sum(one.job.gpus == 0 for one in state.running)
        return () if beside < CPU_JOBS else None
    room = [gpu for gpu in state.gpus if takes(job, gpu, state.running)]
    if not job.exclusive:  # where others already share, timings keep the rest
        room.sort(key=lambda gpu: not any(gpu in one.gpus for one in state.running))
    return tuple(room[: job.gpus]) if len(room) >= job.gpus else None


def waits(job: Job, state: State, pending: Sequence[Job]) -> bool:
    """Whether a job it needs or follows is still to come; it does not follow what cannot start."""
    coming = {one.job.name for one in state.running}
    needed = coming | {one.name for one in pending}
    followed = coming | {one.name for one in pending if fits(one, state)}
    return any(n in needed for n in job.needs) or any(n in followed for n in job.after)


def ready_at(job: Job, state: State) -> float | None:
    """When the last running job that `job` waits for should end; None where none of them runs."""
    before = {*job.needs, *job.after}
    return max((one.until_s for one in state.running if one.job.name in before), default=None)


def lacks(job: Job, state: State, done: Collection[str], names: Collection[str]) -> str | None:
    """The needed job without which `job` cannot run any more: failed, or not in the table."""
    for need in job.needs:
        if need in done or need in state.succeeded:
            continue
        if need in state.ended or need not in names:
            return need
    return None


def fits(job: Job, state: State) -> bool:
    return state.now_s + job.expect_s <= state.budget_s and job.gpus <= len(state.gpus)


def next_job(
    pending: Sequence[Job], state: State, done: Collection[str]
) -> tuple[Job, tuple[int, ...]] | None:
    """The next job to start and its GPUs, or None when nothing can start now."""
    names = {job.name for job in pending} | {one.job.name for one in state.running}
    names |= set(state.ended)
    held_until: float | None = None
    for job in sorted(pending, key=lambda job: job.priority):
        if lacks(job, state, done, names) or not fits(job, state):
            continue
        if waits(job, state, pending):
            if job.gpus > 1 and held_until is None:
                held_until = ready_at(job, state)
            continue
        gpus = place(job, state)
        patient = held_until is None or job.gpus == 0
        if gpus is not None and (patient or state.now_s + job.expect_s <= (held_until or 0.0)):
            return job, gpus
        if gpus is None and job.gpus > 1 and held_until is None:
            held_until = max((one.until_s for one in state.running if one.gpus), default=0.0)
    return None


def plan(
    jobs: Sequence[Job], gpus: tuple[int, ...], budget_s: float, done: Collection[str] = ()
) -> Mapping[str, float]:
    """Expected start of every job that fits if all take what they are expected to take.

    `done` are jobs that ended well in earlier calls on the same machine; vital ones run again.
    """
    pending = [job for job in jobs if job.name not in done or job.vital]
    running: list[Running] = []
    ended: set[str] = set()
    starts: dict[str, float] = {}
    now = 0.0
    while True:
        state = State(now, budget_s, gpus, tuple(running), frozenset(ended), frozenset(ended))
        found = next_job(pending, state, done)
        if found is not None:
            job, where = found
            pending.remove(job)
            running.append(Running(job, where, now + job.expect_s))
            starts[job.name] = now
            continue
        if not running:
            return starts
        first = min(running, key=lambda one: one.until_s)
        running.remove(first)
        now = first.until_s
        ended.add(first.job.name)
