"""Kimi Delta Attention for training: chunked, batched over sequences and heads, differentiable.

The same recurrence as `glm_exl3.ref.kda` and transformers' `chunk_kimi_delta_attention`, arranged
so that almost all work is batched matrix products. A chunk is 64 tokens, so that only T/64 steps
are sequential; exponents stay finite because each 16-token row block measures decay from its own
start: with a gate in [-5, 0] an exponent never exceeds 80. The triangular system of a chunk is
solved once for both right-hand sides. Everything inside is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
ROWS = 16
NORM_EPS = 1e-6


def unit(x: Tensor) -> Tensor:
    """L2-normalise the last dim in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)


def split_chunks(x: Tensor) -> Tensor:
    """`[B, T, H, D]` to `[B * H, T / 64, 64, D]`."""
    batch, length, heads, width = x.shape
    x = x.view(batch, length // CHUNK, CHUNK, heads, width)
    return x.permute(0, 3, 1, 2, 4).reshape(batch * heads, length // CHUNK, CHUNK, width)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalise, scale and chunk: returns q, k, v, cumulative g and beta `[..., 64, 1]`, fp32."""
    q = unit(q) * q.shape[-1] ** -0.5
    chunks = [split_chunks(x) for x in (q, unit(k), v.float(), g, beta.float()[..., None])]
    return chunks[0], chunks[1], chunks[2], chunks[3].cumsum(-2), chunks[4]


def block_scores(q: Tensor, k: Tensor, total: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """Decayed products of one 16-token row block with the keys up to its end, padded to 64.

    Returns (q k^T, k k^T) rows `[..., 16, 64]`; entries right of the diagonal are meaningless.
    """
    begin, end = row * ROWS, (row + 1) * ROWS
    start = total[..., begin - 1 : begin, :] if begin else torch.zeros_like(total[..., :1, :])
    forward = (total[..., begin:end, :] - start).exp()
    keys = k[..., :end, :] * (start - total[..., :end, :]).exp()
    rows = torch.cat([q[..., begin:end, :] * forward, k[..., begin:end, :] * forward], dim=-2)
    products = torch.nn.functional.pad(rows @ keys.transpose(-1, -2), (0, CHUNK - end))
    return products[..., :ROWS, :], products[..., ROWS:, :]


def scores(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Decayed products within each chunk: q k^T with the diagonal, k k^T below it."""
    blocks = [block_scores(q, k, total, row) for row in range(CHUNK // ROWS)]
    reading = torch.cat([block[0] for block in blocks], dim=-2).tril()
    writing = torch.cat([block[1] for block in blocks], dim=-2).tril(-1)
    return reading, writing


def carry(local: Tensor, erase: Tensor, closing: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Run the state over the chunks.

    local, erase `[M, N, 64, D]`, closing `[M, N, D, 64]`, decay `[M, N, D, 1]`. Returns the updates
    `[M, N, 64, D]` and the state before each chunk `[M, N, D, D]`.
    """
    count, chunks, _, width = local.shape
    state = local.new_zeros(count, width, width)
    updates, states = [], []
    for index in range(chunks):
        states.append(state)
        update = torch.baddbmm(local[:, index], erase[:, index], state, alpha=-1)
        updates.append(update)
        state = torch.baddbmm(state * decay[:, index], closing[:, index], update)
    return torch.stack(updates, 1), torch.stack(states, 1)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Outputs fp32 `[B, T, H, D]` for q, k, v `[B, T, H, D]`, log decay g (fp32), beta `[B, T, H]`.

    q and k are raw (normalised here); T must be a multiple of 64; the state starts at zero.
    """
    batch, length, heads, width = q.shape
    q, k, v, total, beta = prepare(q, k, v, g, beta)
    reading, writing = scores(q, k, total)
    grown = total.exp()
    sides = torch.cat([v, k * grown], dim=-1) * beta
    system = writing * beta + torch.eye(CHUNK, device=q.device)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    local, erase = solved.split(width, dim=-1)
    last = total[:, :, -1:]
    closing = (k * (last - total).exp()).transpose(-1, -2)
    update, state = carry(local, erase, closing, last.exp().transpose(-1, -2))
    out = (q * grown) @ state + reading @ update
    out = out.view(batch, heads, length // CHUNK, CHUNK, width).permute(0, 2, 3, 1, 4)
    return out.reshape(batch, length, heads, width)
