"""The window's look-up against a brute-force reading of what a hit needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3.kvcache.window import FineSlidingWindowManager, FineSlidingWindowSpec, refine

UNIT, BLOCK = 16, 64


def spec(window: int, block: int = BLOCK) -> FineSlidingWindowSpec:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    plain = SlidingWindowSpec(
        block_size=block,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.bfloat16,
        sliding_window=window,
        is_draft=True,
    )
    return refine(plain)


class Pool:
    """Blocks under the hash of the prefix they end at; a hash is the number of its units."""

    null_block = "null"
    hash_block_size = UNIT

    def __init__(self, entries: dict[int, str]) -> None:
        self.entries = entries

    def get_cached_block(self, key: int, groups: list[int]) -> list[Any] | None:
        found = self.entries.get(key)
        return [found] * len(groups) if found else None


def look_up(entries: dict[int, str], limit: int, window: int, drop: bool = False) -> Any:
    hashes = list(range(1, limit // UNIT + 3))
    return FineSlidingWindowManager.find_longest_cache_hit(
        block_hashes=hashes,
        max_length=limit,
        kv_cache_group_ids=[4],
        block_pool=Pool(entries),
        kv_cache_spec=spec(window),
        drop_eagle_block=drop,
        alignment_tokens=UNIT,
    )


def expected(entries: dict[int, str], limit: int, window: int) -> int:
    """The longest hit by definition: every row of the window lies in a block that is known."""

    def covered(row: int, end: int) -> bool:
        block_end = (row // BLOCK + 1) * BLOCK
        if block_end <= end:
            return block_end // UNIT in entries
        return end // UNIT in entries or (
            block_end // UNIT in entries and block_end // UNIT <= limit // UNIT + 2
        )

    for end in range(limit // UNIT * UNIT, 0, -UNIT):
        rows = range(max(0, end - window + 1), end)
        if all(covered(row, end) for row in rows):
            return end
    return 0


@given(
    known=st.sets(st.integers(1, 24)),
    limit=st.integers(0, 24 * UNIT),
    window=st.integers(2, 200),
)
def test_the_longest_hit_is_the_one_by_definition(known: set[int], limit: int, window: int) -> None:
    entries = {key: f"block {key}" for key in known}
    (blocks,), length = look_up(entries, limit, window)
    assert length == expected(entries, limit, window)
    assert len(blocks) == -(-length // BLOCK)
    first = max(0, length - window + 1) // BLOCK
    assert all(block == "null" for block in blocks[:first])
    assert all(block != "null" for block in blocks[first:])


def test_a_hit_may_end_inside_the_block_in_which_the_prompt_ended() -> None:
    entries = {4: "first", 8: "second", 10: "tail"}
    (blocks,), length = look_up(entries, 11 * UNIT, window=100)
    assert (length, blocks) == (10 * UNIT, ["first", "second", "tail"])


def test_a_full_block_serves_a_shorter_prefix() -> None:
    (blocks,), length = look_up({4: "first", 8: "second"}, 7 * UNIT, window=100)
    assert (length, blocks) == (7 * UNIT, ["first", "second"])


def test_a_missing_block_of_the_window_shortens_the_hit() -> None:
    (blocks,), length = look_up({4: "first", 12: "third"}, 12 * UNIT, window=100)
    assert (length, blocks) == (4 * UNIT, ["first"])


def test_rows_before_the_window_are_not_needed() -> None:
    (blocks,), length = look_up({12: "third"}, 12 * UNIT, window=60)
    assert (length, blocks) == (12 * UNIT, ["null", "null", "third"])


def test_a_drafter_that_reads_ahead_gives_one_unit_back() -> None:
    (blocks,), length = look_up({4: "first", 6: "tail"}, 6 * UNIT, window=200, drop=True)
    assert (length, blocks) == (5 * UNIT, ["first", "tail"])


def test_whole_blocks_stay_with_vllm() -> None:
    pool = Pool({1: "first", 2: "second"})
    pool.hash_block_size = BLOCK
    (blocks,), length = FineSlidingWindowManager.find_longest_cache_hit(
        block_hashes=[1, 2],
        max_length=2 * BLOCK,
        kv_cache_group_ids=[0],
        block_pool=pool,
        kv_cache_spec=spec(window=100),
        drop_eagle_block=False,
        alignment_tokens=BLOCK,
    )
    assert (length, blocks) == (2 * BLOCK, ["first", "second"])


@given(
    boundaries=st.lists(st.integers(1, 1000), max_size=3),
    start=st.integers(0, 8),
    count=st.integers(1, 8),
    window=st.integers(2, 300),
)
def test_every_full_block_a_later_hit_needs_is_kept(
    boundaries: list[int], start: int, count: int, window: int
) -> None:
    mask = FineSlidingWindowManager.reachable_block_mask(
        start, start + count, UNIT, spec(window), False, 0, boundaries
    )
    needed = set()
    for boundary in boundaries:
        end = boundary // UNIT * UNIT
        needed |= {row // BLOCK for row in range(max(0, end - window + 1), end // BLOCK * BLOCK)}
    for index in range(count):
        assert mask[index] or start + index not in needed


def test_no_boundary_keeps_no_block() -> None:
    mask = FineSlidingWindowManager.reachable_block_mask(0, 4, UNIT, spec(100), False, 0, ())
    assert mask == [False] * 4


@pytest.mark.parametrize("field", ["block_size", "page_size_bytes", "sliding_window", "is_draft"])
def test_our_spec_has_the_bytes_of_vllms(field: str) -> None:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    values = {
        "block_size": 64, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16,
        "sliding_window": 100, "is_draft": True,
    }  # fmt: skip
    plain = SlidingWindowSpec(**values)
    assert getattr(refine(plain), field) == getattr(plain, field)


def test_another_spec_is_left_alone() -> None:
    other = SimpleNamespace(block_size=64)
    assert refine(other) is other


def test_groups_of_both_kinds_may_mix() -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    assert UniformTypeKVCacheSpecs.is_uniform_type({"a": spec(100), "b": spec(100)})
    assert not UniformTypeKVCacheSpecs.is_uniform_type({"a": spec(100), "b": spec(50)})
