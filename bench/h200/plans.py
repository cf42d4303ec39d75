"""Which jobs each call of a visit takes, in the order in which they should start.

A call is at most ten minutes, so the expected times of a plan end before the budget of `h200.run`:
`ops`, `engines` and `model` on one GPU, `pair` on two. What jobs need comes along by itself. A
later plan on the same machine leaves out what ended well before; `more` is for time that is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from h200.job import Job

OPS = (
    "library", "site", "caches", "flashinfer", "tiny", "folders", "warm", "gpu-tests", "memcheck",
    "racecheck", "kv", "recode.projections", "seam", "tune", "layers.few", "peer.package",
    "peer.engine4",
)  # fmt: skip
ENGINES = ("drafting.methods", "text.fused", "kv.turns", "recode.step")
MODEL = ("full.step", "full.long", "peer.engine45")
PAIR = ("pair.served", "pair.verify7", "gpu-tests.two")
MORE = (
    "full.ready", "peer.engine8", "drafting.time", "kv.heads", "full.served",
    "full.fused", "full.verify7", "pair.step", "text.two", "verify.16", "full.steer", "kv.text",
    "kv.variants", "text.one", "recode.nano", "drafting.pack", "edits", "peer.kernels", "kernels",
)  # fmt: skip
PLANS: Mapping[str, tuple[str, ...]] = {
    "ops": OPS, "engines": ENGINES, "model": MODEL, "pair": PAIR, "more": MORE
}  # fmt: skip


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
