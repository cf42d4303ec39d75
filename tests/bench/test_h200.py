"""The table of GPU jobs and its schedule."""

from __future__ import annotations

from h200.run import JOBS, filled
from h200.schedule import plan


def test_jobs_have_names_of_their_own_and_need_known_ones() -> None:
    names = [job.name for job in JOBS]
    assert len(set(names)) == len(names)
    assert {need for job in JOBS for need in job.needs} <= set(names)


def test_a_plan_starts_what_is_needed_first_and_keeps_the_budget() -> None:
    starts = plan(JOBS, (0, 1), 560)
    for job in JOBS:
        if job.name in starts:
            assert starts[job.name] + job.expect_s <= 560
            assert all(starts[need] < starts[job.name] for need in job.needs)


def test_placeholders_are_filled_at_every_depth() -> None:
    assert filled({"a": ["{out}/x", 3]}, {"out": "o"}) == {"a": ["o/x", 3]}
