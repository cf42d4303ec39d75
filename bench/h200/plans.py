"""Which jobs each call of a visit takes, in the order in which they should start; two GPUs.

A call is at most ten minutes, so a plan's expected times end before the budget of `h200.run`. What
jobs need comes along by itself. A later plan on the same machine leaves out what ended well before;
`more` is for time that is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from h200.job import Job

ONE = (
    "library", "site", "caches", "flashinfer", "tiny", "folders", "warm", "peer.package",
    "one-lane", "peer.kernels", "gpu-tests", "memcheck", "racecheck", "edits",
    "drafting.pack", "text.one", "text.two", "recode.nano",
)  # fmt: skip
TWO = (
    "pair.served", "pair.verify7", "recode.projections", "kv", "drafting.time", "kv.turns",
)  # fmt: skip
THREE = (
    "drafting.methods", "recode.step", "full.verify7", "peer.engine8", "peer.engine45",
)  # fmt: skip
MORE = (
    "full.step", "full.window", "full.fused", "full.together-fused", "verify.3", "verify.5",
    "verify.8", "pair.step", "full.steer", "compare.one-lane", "kv.text", "kv.variants",
    "gpu-tests.two",
)  # fmt: skip
PLANS: Mapping[str, tuple[str, ...]] = {"one": ONE, "two": TWO, "three": THREE, "more": MORE}


def with_needs(names: Iterable[str], jobs: Sequence[Job], tried: Collection[str] = ()) -> list[str]:
    """`names` with all that they need or follow before them, each once.

    What is only to be followed and was `tried` before stays out, however it ended.
    """
    known, found = {job.name: job for job in jobs}, dict[str, None]()

    def add(name: str) -> None:
        for before in known[name].needs:
            add(before)
        for before in known[name].after:
            if before not in tried:
                add(before)
        found.setdefault(name)

    for name in names:
        add(name)
    return list(found)


def planned(plans: Iterable[str], jobs: Sequence[Job], tried: Collection[str] = ()) -> list[Job]:
    """The jobs of `plans`; their place is their priority. Raises KeyError for an unknown plan."""
    known = {job.name: job for job in jobs}
    wanted = [name for plan in plans for name in PLANS[plan]]
    order = with_needs(wanted, jobs, tried)
    return [replace(known[name], priority=place) for place, name in enumerate(order)]
