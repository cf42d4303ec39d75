"""The bounds that measured times are put beside."""

from __future__ import annotations

from kv.bounds import CHOSEN, H200, attention, scoring


def test_one_token_is_bound_by_memory() -> None:
    bound = attention(H200, 1, 64, 1 << 17, 1024, 1)
    assert bound.cause == "HBM"
    assert bound.memory_us > 1e6 * CHOSEN * 1024 / H200.memory


def test_prefill_is_bound_by_gathers_that_no_token_shares() -> None:
    bound = attention(H200, 2048, 64, 1 << 17, 1024, 1)
    assert bound.cause in {"L2", "MMA"}
    assert bound.us > 100 * attention(H200, 1, 64, 1 << 17, 1024, 1).us


def test_smaller_rows_lower_the_bound_of_decode() -> None:
    sizes = [attention(H200, 8, 16, 1 << 15, size, 8).us for size in (528, 1024)]
    assert sizes[0] < sizes[1]


def test_scores_grow_with_the_context() -> None:
    assert scoring(H200, 1, 16, 1 << 19, 1).us > scoring(H200, 1, 16, 1 << 13, 1).us
