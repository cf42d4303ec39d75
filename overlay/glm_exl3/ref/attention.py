"""Attention over gathered keys: sparse multi-query for MLA, and grouped-query with a window.

Why this shape: the engine's paged caches differ per back end, so these functions take the rows they
attend to. Every query is its own small batch of products, so a token gets the same bits alone as in
a verify step. All maths is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_mqa(q: Tensor, rows: Tensor, valid: Tensor, scale: float, value_dim: int) -> Tensor:
    """Multi-query attention of T tokens, each over its own rows.

    q `[T, H, D]`, rows `[T, W, D]`, valid bool `[T, W]`; the first `value_dim` features of a row
    are its value. Returns fp32 `[T, H, value_dim]`; zeros where no row is valid.
    """
    wide = rows.float()
    scores = torch.bmm(q.float(), wide.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(~valid[:, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num_(0.0)
    return torch.bmm(weights, wide[..., :value_dim])


def masked_mqa(q: Tensor, rows: Tensor, valid: Tensor, scale: float, value_dim: int) -> Tensor:
    """Like `sparse_mqa` with one set of rows `[L, D]` for all T tokens and valid `[T, L]`."""
    tokens, heads, _ = q.shape
    wide = rows.float()
    scores = (q.float().flatten(0, 1) @ wide.t()).mul_(scale).view(tokens, heads, -1)
    scores.masked_fill_(~valid[:, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num_(0.0)
    return (weights.flatten(0, 1) @ wide[:, :value_dim]).view(tokens, heads, value_dim)


def visible(queries: int, keys: int, *, causal: bool, window: int | None = None) -> Tensor:
    """Mask `[queries, keys]` of the last `queries` positions of a sequence of `keys`.

    `window` w keeps keys closer than w: behind the query, and before it where not causal.
    """
    position = torch.arange(keys - queries, keys)[:, None]
    key = torch.arange(keys)[None, :]
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        mask &= key <= position
    if window is not None:
        mask &= (position - key).abs() < window
    return mask


def grouped_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q `[T, H, D]`, k `[L, G, D]`, v `[L, G, E]`, G divides H, mask `[T, L]` -> `[T, H, E]`."""
    tokens, heads, width = q.shape
    groups = k.shape[1]
    queries = q.float().view(tokens, groups, heads // groups, width).permute(1, 2, 0, 3)
    keys, values = k.float().permute(1, 2, 0), v.float().permute(1, 0, 2)
    scores = torch.matmul(queries, keys[:, None]).mul_(scale)
    scores.masked_fill_(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num_(0.0)
    out = torch.matmul(weights, values[:, None])
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, v.shape[-1])
