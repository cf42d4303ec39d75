"""A sliding-window group whose prefix hits may end inside a block.

vLLM 0.33 lands prefix hits on multiples of `prefix_match_unit` only if every cacheable group can
find its blocks at that grain. Full attention and KDA can; its sliding-window manager cannot, so one
drafter with a window takes the whole model back to whole blocks, which are thousands of tokens long
beside KDA. The window's rows are written once and in order, like full attention's. So a block that
is not full serves a hit up to where it was written, and the reader takes a private copy; the copy
itself is vLLM's own.

What must stay true: a hit at position `p` needs every row of `[p - window + 1, p)`. The block that
holds row `p - 1` is found under the hash of the prefix that ends at `p`, or, where that block is
full, under its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import SlidingWindowSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

KVCacheSpecRegistry.check_kv_cache_spec_registry({})
"""vLLM registers its own specs at the first look-up, and only while none is registered."""


class FineSlidingWindowManager(SlidingWindowManager):
    """Finds and keeps a window that ends at any multiple of the match unit."""

    supports_fine_grained_hash_lookup = True

    @classmethod
    @override
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[Any], ...], int]:
        """Blocks per group and the length in tokens of the longest hit up to `max_length`."""
        block = kv_cache_spec.block_size
        if alignment_tokens >= block or block % alignment_tokens:
            return super().find_longest_cache_hit(
                block_hashes,
                max_length,
                kv_cache_group_ids,
                block_pool,
                kv_cache_spec,
                drop_eagle_block,
                alignment_tokens,
                dcp_world_size,
                pcp_world_size,
            )
        lookup = _Lookup(
            block_hashes,
            BlockHashListWithBlockSize(block_hashes, alignment_tokens, block),
            alignment_tokens,
            block,
            lambda key: block_pool.get_cached_block(key, kv_cache_group_ids),
        )
        margin = alignment_tokens if drop_eagle_block else 0
        limit = min(max_length // alignment_tokens, len(block_hashes)) * alignment_tokens
        for end in range(limit, margin, -alignment_tokens):
            first = max(0, end - margin - kv_cache_spec.sliding_window + 1) // block
            found = lookup.run(first, end)
            if found is None:
                continue
            length = end - margin
            kept = -(-length // block)
            return (
                tuple(
                    ([block_pool.null_block] * first + [blocks[group] for blocks in found])[:kept]
                    for group in range(len(kv_cache_group_ids))
                ),
                length,
            )
        return tuple([] for _ in kv_cache_group_ids), 0

    @classmethod
    @override
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: Any,
        use_eagle: bool,
        retention_interval: int | None = None,
        reachable_boundaries: Sequence[int] = (),
        dcp_world_size: int = 1,
        final_segment_end_block: int | None = None,
    ) -> list[bool] | None:
        """Which blocks to keep: the windows of positions at which a request may go on.

        Where vLLM's own rule is block-grained it decides; below a block it would keep every block,
        which lets the drafter push conversations out of the pool.
        """
        block = kv_cache_spec.block_size * dcp_world_size
        if alignment_tokens is None or retention_interval is None or alignment_tokens % block == 0:
            return super().reachable_block_mask(
                start_block,
                end_block,
                alignment_tokens,
                kv_cache_spec,
                use_eagle,
                retention_interval,
                reachable_boundaries,
                dcp_world_size,
                final_segment_end_block,
            )
        ends = [position // grain * grain for position in reachable_boundaries
                for grain in (alignment_tokens, block)]  # fmt: skip
        if retention_interval:
            segments = range(retention_interval, end_block * block + 1, retention_interval)
            ends += segments
        mask = [False] * (end_block - start_block)
        window = kv_cache_spec.sliding_window
        for end in ends:
            first = max(0, end - window + 1) // block
            last = (end + (alignment_tokens if use_eagle else 0)) // block
            for index in range(max(first, start_block), min(last, end_block)):
                mask[index - start_block] = True
        return mask

    def cache_blocks(
        self,
        request: Any,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Register full blocks, and the block in which the prompt ends up to there."""
        super().cache_blocks(
            request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
        )
        if self.cache_hit_alignment_tokens < self.block_size:
            self._cache_partial_tail_block(request, num_tokens)

    _cache_partial_tail_block = FullAttentionManager._cache_partial_tail_block


@dataclass(frozen=True)
class _Lookup:
    """The cached blocks behind the hashes of one request."""

    prefixes: Any
    full: Any
    unit: int
    block: int
    cached: Any

    def run(self, first: int, end: int) -> list[Any] | None:
        """Blocks `first` up to the one that holds row `end - 1`; None if one is missing."""
        found = []
        last = end // self.block
        if end % self.block:
            tail = self.cached(self.prefixes[end // self.unit - 1])
            if not tail and last < len(self.full):
                tail = self.cached(self.full[last])
            if not tail:
                return None
            found.append(tail)
        for index in range(last - 1, first - 1, -1):
            blocks = self.cached(self.full[index])
            if not blocks:
                return None
            found.append(blocks)
        return found[::-1]


@register_kv_cache_spec(
    manager_class=FineSlidingWindowManager, uniform_type_base_spec=SlidingWindowSpec
)
@dataclass(frozen=True, kw_only=True)
class FineSlidingWindowSpec(SlidingWindowSpec):
    """vLLM's sliding-window spec under the manager above; bytes and sizes are the same."""


def refine(spec: Any) -> Any:
    """The same spec under our manager where it is vLLM's plain sliding window, else `spec`."""
    return replace_as(spec, FineSlidingWindowSpec) if type(spec) is SlidingWindowSpec else spec
