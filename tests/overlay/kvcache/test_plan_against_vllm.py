"""The planner's arithmetic against vLLM's own functions, for the full-size model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glm_exl3.format import kv_plan
from glm_exl3.format.kv import RowLayout
from kvcache.pool import Case, Draft, plan

WITHIN = 0.02


def ours(case: Case) -> kv_plan.CachePlan:
    drafter = case.draft and kv_plan.Drafter(
        case.draft.layers, case.draft.kv_heads, case.draft.head_dim, case.draft.window
    )
    scales = case.row_bytes - 512 * case.value_bytes
    row = RowLayout("row", case.value_bytes, 512 if scales else 0, scales)
    geometry = kv_plan.CacheGeometry(34, 11 + case.mtp, 64, drafter=drafter)
    options = kv_plan.CacheOptions(
        ranks=case.ranks,
        drafts=case.drafts,
        row=row,
        state_bytes=case.state_bytes,
        draft_value_bytes=case.draft_value_bytes,
        granule=case.granule,
        checkpoints=case.checkpoints,
        in_flight_tokens=case.in_flight_tokens,
    )
    return kv_plan.plan_cache(geometry, options)


SM120 = Case()
SM90 = Case(row_bytes=1024, value_bytes=2, granule=512)
ROWS_528 = Case(row_bytes=528, granule=512)
CASES = {
    f"{name}-tp{ranks}-{draft}-state{state}": replace(
        base, ranks=ranks, state_bytes=state, checkpoints=name == "sm90", **change
    )
    for name, base in (("sm120", SM120), ("sm90", SM90), ("rows528", ROWS_528))
    for ranks in (1, 2, 4)
    for state in (4, 2)
    for draft, change in (
        ("none", {"draft": None, "drafts": 0}),
        ("dflash2", {}),
        ("dflash2-fp8", {"draft_value_bytes": 1}),
        ("mtp", {"draft": None, "drafts": 3, "mtp": True}),
    )
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_planner_and_vllm_agree(case: Case) -> None:
    made, own = plan(case), ours(case)
    assert own.block_tokens == made.block_tokens
    assert len(own.groups) == len(made.groups)
    assert own.blocks(case.max_model_len) == made.request_blocks
    assert own.block_bytes == pytest.approx(made.block_bytes, rel=WITHIN)
    assert own.request_bytes(case.max_model_len) == pytest.approx(made.request_bytes, rel=WITHIN)


@pytest.mark.parametrize("length", [8192, 131072, 393216, 1048576])
def test_the_length_of_a_request_is_counted_like_vllms(length: int) -> None:
    case = replace(SM120, max_model_len=length)
    assert ours(case).blocks(length) == plan(case).request_blocks


def test_the_known_block_of_the_published_geometry() -> None:
    made = plan(replace(SM120, in_flight_tokens=8192))
    assert (made.block_tokens, made.request_blocks) == (5120, 57)
    assert made.block_bytes == pytest.approx(52.4e6, rel=0.001)


def test_a_full_attention_drafter_shares_the_blocks_of_mla() -> None:
    own = kv_plan.plan_cache(
        kv_plan.CacheGeometry(3, 1, 4, drafter=kv_plan.Drafter(2, 4, 128)),
        kv_plan.CacheOptions(drafts=3),
    )
    assert [group.layers for group in own.groups] == [4, 3, 1]


def test_a_fixed_request_costs_at_most_six_tenths_of_unmodified_vllm() -> None:
    ours_now = replace(SM120, row_bytes=528, state_bytes=2, draft_value_bytes=1)
    before, now = plan(SM120), plan(ours_now)
    grows = -(-SM120.max_model_len // before.block_tokens)
    fixed_before = (before.request_blocks - grows) * before.block_bytes
    assert ours(SM120).fixed_bytes == pytest.approx(fixed_before, rel=WITHIN)
    grows = -(-SM120.max_model_len // now.block_tokens)
    fixed_now = (now.request_blocks - grows) * now.block_bytes
    assert ours(ours_now).fixed_bytes == pytest.approx(fixed_now, rel=WITHIN)
    assert fixed_now <= 0.6 * fixed_before
    assert Draft().window == 2048
