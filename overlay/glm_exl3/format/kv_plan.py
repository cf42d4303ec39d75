"""What the KV cache costs: block, groups and bytes of one request, before anything is loaded.

vLLM keeps one pool of equal blocks. Layers of one kind form groups, every group of a request takes
blocks of its own, and every block is as wide as the widest group. The block grows until one MLA
page covers one KDA state, so a few numbers of the geometry decide what a request costs before its
first token. The arithmetic is that of vLLM 0.33 (`Platform._align_hybrid_block_size`,
`kv_cache_planning._get_packed_kv_cache_groups`), restated without vLLM so that the launcher can
predict memory and say why; tests compare it with vLLM's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.kv import (
    BF16,
    BF16_BYTES,
    LATENT,
    POOL_ROW_BYTES,
    POOL_TOKENS,
    RowLayout,
    index_page_bytes,
    page_bytes,
    tail_ring_bytes,
)

GIB = 2**30
LENGTHS = (8192, 32768, 131072, 262144, 393216, 524288, 1048576)
PREFIX_UNIT = 256
INDEXER_FACTOR = 5
MLA_BLOCK_MULTIPLE = 128
GRANULE, GRANULE_SM120 = 512, 1024
"""Tokens of the index kernel's smallest page: 32 pools of 16, on SM120 64."""


@dataclass(frozen=True)
class Drafter:
    """Attention of a draft model; `window` 0 attends to everything."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True)
class CacheGeometry:
    """What a checkpoint stores per token and per request.

    `linear_*` is KDA: heads, head dimension, kernel of its convolution. An MTP head is one more
    MLA layer.
    """

    linear_layers: int
    mla_layers: int
    linear_heads: int
    linear_dim: int = 128
    conv_kernel: int = 4
    drafter: Drafter | None = None


@dataclass(frozen=True)
class CacheOptions:
    """How it is stored.

    `ranks` share heads; `drafts` tokens are verified per step. `granule` is the block of the
    attention kernel in tokens. `checkpoints`: the KDA kernel writes a prompt's last state inside a
    chunk (FlashKDA), which takes a block more. `in_flight_tokens` may be scheduled and not settled.
    `prefix_caching` keeps states at block boundaries.
    """

    ranks: int = 1
    drafts: int = 0
    row: RowLayout = BF16
    state_bytes: int = 4
    draft_value_bytes: int = BF16_BYTES
    granule: int = GRANULE
    checkpoints: bool = False
    in_flight_tokens: int = 8192
    prefix_caching: bool = True


@dataclass(frozen=True)
class Group:
    """Layers that take their blocks together.

    `bytes` of a block they fill; `fixed` blocks per request, or per `token_block` tokens; `window`
    caps the latter.
    """

    name: str
    layers: int
    bytes: int
    fixed: int = 0
    token_block: int = 0
    window: int = 0

    def blocks(self, tokens: int) -> int:
        """Blocks that a request of `tokens` holds at most."""
        if self.window:
            return -(-min(self.window, tokens) // self.token_block) + 1
        return self.fixed or -(-tokens // self.token_block)


@dataclass(frozen=True)
class CachePlan:
    """The pool's block and what a request takes of it, per rank."""

    block_tokens: int
    block_bytes: int
    state_bytes: int
    state_page_bytes: int
    groups: tuple[Group, ...]

    def blocks(self, tokens: int) -> int:
        return sum(group.blocks(tokens) for group in self.groups)

    def request_bytes(self, tokens: int) -> int:
        return self.blocks(tokens) * self.block_bytes

    @property
    def fixed_blocks(self) -> int:
        """Blocks of a request that do not depend on its length."""
        grows = [group for group in self.groups if group.token_block and not group.window]
        return self.blocks(self.block_tokens * 64) - 64 * len(grows)

    @property
    def fixed_bytes(self) -> int:
        return self.fixed_blocks * self.block_bytes

    def pool_blocks(self, pool_bytes: int) -> int:
        return pool_bytes // self.block_bytes

    def concurrency(self, pool_bytes: int, tokens: int) -> float:
        """Requests of `tokens` that the pool holds; one of its blocks stays empty."""
        return max(0, self.pool_blocks(pool_bytes) - 1) / self.blocks(tokens)

    def longest(self, pool_bytes: int) -> int:
        """Tokens of the longest single request, 0 if none fits."""
        free = self.pool_blocks(pool_bytes) - 1
        blocks = free - self.fixed_blocks
        return max(0, blocks * self.block_tokens)

    @property
    def prefix_unit(self) -> int:
        """Grain of prefix hits: at most 256 tokens, whole pools, a divisor of the block."""
        return prefix_unit(self.block_tokens)


def prefix_unit(block_tokens: int, at_most: int = PREFIX_UNIT) -> int:
    """The largest divisor of the block that is a multiple of 16 and at most `at_most`."""
    return max(unit for unit in range(16, at_most + 1, 16) if block_tokens % unit == 0)


def plan_cache(geometry: CacheGeometry, options: CacheOptions) -> CachePlan:
    """The pool for this checkpoint. Raises GlmExl3Error for heads that ranks cannot share."""
    _check(geometry, options)
    row_bytes = LATENT * options.row.value_bytes
    state = state_bytes(geometry, options)
    multiple = math.lcm(max(options.granule, MLA_BLOCK_MULTIPLE), 16)
    tokens = multiple * -(-state // (multiple * row_bytes))
    page = tokens * row_bytes
    buckets = _buckets(geometry, options, tokens, page)
    groups = tuple(
        group for bucket, count in zip(buckets, _split(buckets), strict=True)
        for group in bucket.into(count)
    )  # fmt: skip
    widest = max(group.bytes for group in groups)
    rows = options.row.row_bytes
    return CachePlan(tokens, -(-widest // rows) * rows, state, page, groups)


def state_bytes(geometry: CacheGeometry, options: CacheOptions) -> int:
    """One KDA layer's state of one request on one rank: recurrent state and convolution tail."""
    heads, dim = geometry.linear_heads // options.ranks, geometry.linear_dim
    tail = 3 * heads * dim * (geometry.conv_kernel - 1 + options.drafts) * BF16_BYTES
    return heads * dim * dim * options.state_bytes + tail


def _check(geometry: CacheGeometry, options: CacheOptions) -> None:
    if geometry.linear_heads % options.ranks:
        raise GlmExl3Error(
            code="kv-ranks",
            seen=f"{geometry.linear_heads} KDA heads on {options.ranks} ranks",
            why="every rank holds whole heads",
            fix="use 1, 2 or 4 ranks",
        )


@dataclass(frozen=True)
class _Bucket:
    """Layers that vLLM would put into one group: page sizes with their number of layers.

    `state`: pages that need not sit beside the others of their kind.
    """

    name: str
    pages: tuple[tuple[int, int], ...]
    shape: Group
    state: bool
    window: bool = False

    @property
    def balanced(self) -> bool:
        return len({count for _, count in self.pages}) == 1

    @property
    def repeats(self) -> int:
        return max(count for _, count in self.pages)

    @property
    def layers(self) -> int:
        return sum(count for _, count in self.pages)

    def widest(self, groups: int) -> int:
        return sum(-(-count // groups) * page for page, count in self.pages)

    def into(self, groups: int) -> list[Group]:
        found = []
        for index in range(groups):
            share = [len(range(index, count, groups)) for _, count in self.pages]
            size = sum(n * page for n, (page, _) in zip(share, self.pages, strict=True))
            name = f"{self.name} {index + 1}/{groups}" if groups > 1 else self.name
            found.append(Group(name, sum(share), size, *_sizes(self.shape)))
        return found


def _sizes(shape: Group) -> tuple[int, int, int]:
    return shape.fixed, shape.token_block, shape.window


def _buckets(
    geometry: CacheGeometry, options: CacheOptions, tokens: int, page: int
) -> list[_Bucket]:
    spare = 2 + options.checkpoints if options.prefix_caching else 1
    state = Group("", 0, 0, fixed=options.drafts + spare)
    rows = [
        (page_bytes(options.row, tokens), geometry.mla_layers),
        (index_page_bytes(tokens), geometry.mla_layers),
    ]
    buckets = [
        _Bucket("KDA state", ((page, geometry.linear_layers),), state, state=True),
        _Bucket(
            "index tail",
            ((tail_ring_bytes(options.drafts), geometry.mla_layers),),
            Group("", 0, 0, fixed=1),
            state=True,
        ),
    ]
    drafter, name = geometry.drafter, "MLA rows and index"
    if drafter is not None:
        heads = max(1, drafter.kv_heads // options.ranks)
        size = tokens * heads * drafter.head_dim * 2 * options.draft_value_bytes
        if drafter.window:
            held = drafter.window - 1 + options.in_flight_tokens
            shape = Group("", 0, 0, token_block=tokens, window=held)
            buckets.append(
                _Bucket("draft window", ((size, drafter.layers),), shape, state=False, window=True)
            )
        else:
            rows.append((size, drafter.layers))
            name = "MLA rows, index and draft rows"
    grows = Group("", 0, 0, token_block=tokens)
    merged: dict[int, int] = {}
    for size, count in rows:
        merged[size] = merged.get(size, 0) + count
    return [_Bucket(name, tuple(merged.items()), grows, state=False), *buckets]


def _split(buckets: Sequence[_Bucket]) -> list[int]:
    """Groups per bucket, as vLLM's packed planner chooses them."""
    floor = max((b.repeats for b in buckets if b.balanced and len(b.pages) > 1), default=0)
    sizes = [b.repeats for b in buckets if b.balanced]
    repeats = _least_padding(sizes, floor) if floor else None

    def plain(bucket: _Bucket) -> int:
        return -(-bucket.repeats // repeats) if bucket.balanced and repeats else 1

    def free(bucket: _Bucket) -> bool:
        return bucket.state or (repeats is None and bucket.window)

    anchor = max(b.widest(b.layers if free(b) else plain(b)) for b in buckets)
    counts = []
    for bucket in buckets:
        count = plain(bucket)
        if free(bucket):
            per_block = max(anchor // bucket.pages[0][0], 1)
            count = max(count, -(-bucket.layers // per_block))
        counts.append(count)
    return counts


def _least_padding(sizes: Sequence[int], floor: int) -> int:
    """The chunk from `floor` up that pads `sizes` least; the larger of equals."""
    chunks = range(floor, max(sizes) + 1)
    return min(chunks, key=lambda chunk: (sum(-size % chunk for size in sizes), -chunk))


def geometry_of(config: Mapping[str, Any], drafter: Mapping[str, Any] | None = None,
                *, mtp: bool = False) -> CacheGeometry:  # fmt: skip
    """The geometry behind config.json of the target and of the drafter.

    Raises GlmExl3Error when a key is missing.
    """
    text = config.get("text_config", config)
    try:
        kinds = text["layer_types"]
        linear = sum(kind == "linear_attention" for kind in kinds)
        attention = text.get("linear_attn_config") or {}
        return CacheGeometry(
            linear_layers=linear,
            mla_layers=len(kinds) - linear + mtp,
            linear_heads=text.get("linear_num_heads") or attention["num_heads"],
            linear_dim=text.get("linear_head_dim") or attention["head_dim"],
            conv_kernel=text.get("linear_conv_kernel_dim") or attention["short_conv_kernel_size"],
            drafter=None if drafter is None else _drafter_of(drafter),
        )
    except KeyError as error:
        raise GlmExl3Error(
            code="kv-config",
            seen=f"config.json lacks {error.args[0]}",
            why="the size of the KV cache follows from it",
            fix="use a config.json of GLM-5.3-Flash and, for the drafter, of DFlash2",
        ) from error


def _drafter_of(config: Mapping[str, Any]) -> Drafter:
    own = config.get("dflash_config", {})
    kinds = config.get("layer_types") or ()
    slides = own.get("use_swa", False) or "sliding_attention" in kinds
    window = own.get("swa_window_size") or config.get("sliding_window") or 0
    return Drafter(
        layers=config["num_hidden_layers"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        window=window if slides else 0,
    )


def with_drafter(geometry: CacheGeometry, drafter: Drafter) -> CacheGeometry:
    """The same target beside this drafter."""
    return replace(geometry, drafter=drafter)


def indexer_workspace(tokens: int, factor: int = INDEXER_FACTOR) -> int:
    """Bytes of the buffer into which a prefill gathers pooled index keys, at `tokens` of context.

    vLLM sizes it for 8 x `sparse_mla_prefill_workspace_factor` requests of full length.
    """
    return 8 * factor * tokens // POOL_TOKENS * POOL_ROW_BYTES


def indexer_factor(tokens: int, budget_bytes: int) -> int:
    """The largest factor, 1 to 5, whose buffer stays within the budget; 1 if none does."""
    fits = [f for f in range(1, INDEXER_FACTOR + 1) if indexer_workspace(tokens, f) <= budget_bytes]
    return max(fits, default=1)


def as_json(
    plan: CachePlan, pool_bytes: int = 0, lengths: Sequence[int] = LENGTHS
) -> dict[str, Any]:
    """The plan as data; sizes in bytes, requests in `concurrency`."""
    return {
        "block_tokens": plan.block_tokens,
        "block_bytes": plan.block_bytes,
        "state_bytes": plan.state_bytes,
        "prefix_unit": plan.prefix_unit,
        "fixed_blocks": plan.fixed_blocks,
        "fixed_bytes": plan.fixed_bytes,
        "groups": [asdict(group) for group in plan.groups],
        "pool_bytes": pool_bytes,
        "pool_blocks": plan.pool_blocks(pool_bytes),
        "longest_request": plan.longest(pool_bytes),
        "requests": [
            {
                "tokens": tokens,
                "blocks": plan.blocks(tokens),
                "bytes": plan.request_bytes(tokens),
                "concurrency": round(plan.concurrency(pool_bytes, tokens), 2),
            }
            for tokens in lengths
        ],
    }
