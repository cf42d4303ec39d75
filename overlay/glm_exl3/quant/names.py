"""How modules of vLLM and modules of a checkpoint correspond.

vLLM merges matrices that share an input into one layer; a checkpoint stores them apart, and for KDA
one packed `qkv_proj` may stand for three of them. Everything that has to translate (dispatch,
cutting, completeness) reads these tables.
"""

from __future__ import annotations

from dataclasses import dataclass

MERGED: dict[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "wk_weights_proj": ("wk", "weights_proj"),
    "in_proj_qkvbfg_a": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
}
"""vLLM layer -> the checkpoint modules it is made of, in shard order."""

KDA_LAYER = "in_proj_qkvbfg_a"
KDA_FUSED = "qkv_proj"
KDA_FUSED_PARTS = ("q_proj", "k_proj", "v_proj")
"""A KDA checkpoint module that holds q, k and v side by side along n."""

CONV_FUSED = "conv1d"
CONV_PARTS = ("q_conv1d", "k_conv1d", "v_conv1d")
"""The same for the depthwise convolutions, which are never packed."""

EXPERT_SHARDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""vLLM's expert shard ids -> checkpoint names."""

FREE_WIDTH = {"gate_up_proj": 1, "down_proj": 0}
"""Layers whose cut dimension never leaves the rank, so ranks may hold different widths.

The value is the cut dimension (1 = out features, 0 = in features).
"""

FREE_WIDTH_PARTS = ("gate_proj", "up_proj", "down_proj")
"""Modules of one parent that must be cut alike when their width is free."""


def split_prefix(prefix: str) -> tuple[str, str]:
    """`a.b.c` -> (`a.b.`, `c`); the first part keeps its dot so that it can be prepended."""
    parent, dot, leaf = prefix.rpartition(".")
    return parent + dot, leaf


def parts_of(prefix: str, *, merged: bool) -> tuple[str, ...]:
    """The checkpoint modules, under vLLM's parent prefix, that layer `prefix` is made of."""
    parent, leaf = split_prefix(prefix)
    names = MERGED.get(leaf, (leaf,)) if merged else (leaf,)
    return tuple(parent + name for name in names)


@dataclass(frozen=True)
class Source:
    """Where a shard comes from: checkpoint module and, of a fused module, which part of how
    many."""

    module: str
    part: int = 0
    parts: int = 1
