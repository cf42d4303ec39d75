"""The key-value cache of a NoPE-MLA layer as arithmetic: what one row holds and weighs.

A row is the latent of one token: 512 numbers, shared by all heads, keys and values at once. The
quantised rows keep their scales behind the numbers, so that a row is one contiguous piece and no
second table exists. Beside it every layer keeps pooled index keys (one per 16 tokens) and, per
request, a ring of raw index keys for the pool that is not complete.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm_exl3.format.errors import GlmExl3Error

LATENT = 512
POOL_TOKENS = 16
INDEX_DIM = 128
POOL_ROW_BYTES = INDEX_DIM + 4
FP32_BYTES = 4
BF16_BYTES = 2


@dataclass(frozen=True)
class RowLayout:
    """One token's latent in the cache.

    `group` numbers share one scale of `scale_bytes`; bf16 rows have none. `row_bytes` is the
    distance between rows.
    """

    name: str
    value_bytes: int
    group: int
    scale_bytes: int

    @property
    def payload_bytes(self) -> int:
        return LATENT * self.value_bytes

    @property
    def scales(self) -> int:
        return LATENT // self.group if self.group else 0

    @property
    def row_bytes(self) -> int:
        return self.payload_bytes + self.scales * self.scale_bytes


BF16 = RowLayout("bf16", BF16_BYTES, 0, 0)
FP8 = RowLayout("fp8", 1, 128, FP32_BYTES)
INT8 = RowLayout("int8", 1, 128, FP32_BYTES)
LAYOUTS: dict[str, RowLayout] = {layout.name: layout for layout in (BF16, FP8, INT8)}
CHOICES = ("auto", *LAYOUTS)
VLLM_NAMES = {"auto": "auto", "bf16": "bfloat16", "fp8": "glm_fp8", "int8": "glm_int8"}
"""What vLLM's `--kv-cache-dtype` is given for each choice; the plugin registers the last two."""


def layout_of(choice: str, capability: tuple[int, int] | None) -> RowLayout:
    """The layout that `KV_CACHE_DTYPE` names; capability None stands for a CPU.

    `auto` keeps what vLLM stores where vLLM has a kernel: fp8 on SM100 and SM120, else bf16.
    Raises GlmExl3Error for another word.
    """
    if choice == "auto":
        return FP8 if capability is not None and capability[0] in {10, 12} else BF16
    if choice not in LAYOUTS:
        raise GlmExl3Error(
            code="kv-layout",
            seen=f"The cache layout {choice!r} was asked for.",
            why="It decides how many bytes each token costs and which kernels read them.",
            fix=f"Use one of {', '.join(CHOICES)}.",
        )
    return LAYOUTS[choice]


def registered_layout(dtype: str | None) -> RowLayout | None:
    """The layout behind one of the plugin's own vLLM dtype names, or None."""
    return next(
        (layout for layout in (FP8, INT8) if VLLM_NAMES[layout.name] == dtype),
        None,
    )


def page_bytes(layout: RowLayout, tokens: int) -> int:
    """Bytes of one MLA layer's rows for a block of `tokens`."""
    return layout.row_bytes * tokens


def index_page_bytes(tokens: int) -> int:
    """Bytes of one layer's pooled index keys for a block; `tokens` is a multiple of a pool."""
    return POOL_ROW_BYTES * (tokens // POOL_TOKENS)


def tail_ring_tokens(drafts: int) -> int:
    """Slots of the ring of raw index keys: a pool and the drafts, in a power of two of pools."""
    pools = -(-(POOL_TOKENS + drafts) // POOL_TOKENS)
    return POOL_TOKENS * (1 << (pools - 1).bit_length())


def tail_ring_bytes(drafts: int) -> int:
    """Bytes of one layer's ring of one request: a key and a gate score per slot, bf16."""
    return tail_ring_tokens(drafts) * 2 * INDEX_DIM * BF16_BYTES
