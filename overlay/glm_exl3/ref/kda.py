"""Kimi Delta Attention: gate, recurrent form and chunked form, in fp32.

Per head, with the state S `[V, K]`, per-channel log decay g <= 0 and step size beta:

    S <- S diag(exp(g));  u = beta (v - S k);  S <- S + u k^T;  o = S q

Why two forms: the recurrent form is decode and verify (it yields the state after every token, which
speculative decoding keeps), the chunked form is prefill: within a chunk the u of all tokens solve
one triangular system, so the number of sequential steps falls by the chunk length. The chunk is
short enough that exp(-sum of g) stays finite in fp32: with the bounded gate of this model
(g >= -5) that is 16 tokens.

What must stay true: queries are scaled by K^-0.5 and keys normalised by the callers' `prepare`;
both forms give the same numbers up to fp32 rounding. Source: the Kimi Linear report and
transformers' `recurrent_kimi_delta_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_EXPONENT = 80.0
NORM_EPS = 1e-6


def normalise(x: Tensor) -> Tensor:
    """L2-normalise the last dim in fp32, with the eps under the root."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)


def bounded_gate(raw: Tensor, a_log: Tensor, bias: Tensor, lower_bound: float) -> Tensor:
    """Log decay in (lower_bound, 0): raw `[..., H, K]`, a_log H elements, bias H * K elements."""
    heads, width = raw.shape[-2:]
    slope = a_log.float().exp().view(heads, 1)
    return lower_bound * torch.sigmoid(slope * (raw.float() + bias.float().view(heads, width)))


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of B independent heads.

    state `[B, V, K]`, q/k/decay `[B, K]`, v `[B, V]`, beta `[B]`, all fp32; `decay` is exp(g) and
    `q` carries the scale. Returns o `[B, V]` and the new state.
    """
    state = state * decay[:, None, :]
    update = v - torch.bmm(state, k[:, :, None])[:, :, 0]
    update *= beta[:, None]
    state = torch.baddbmm(state, update[:, :, None], k[:, None, :])
    return torch.bmm(state, q[:, :, None])[:, :, 0], state


def chunk_length(lower_bound: float) -> int:
    """The longest chunk whose summed log decay keeps exp(+-sum) finite in fp32."""
    return max(1, int(MAX_EXPONENT / max(-lower_bound, 1e-3)))


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, size: int = 16
) -> tuple[Tensor, Tensor]:
    """A run of T tokens of one sequence.

    fp32 q/k/g `[T, H, K]` (q scaled), v `[T, H, V]`, beta `[T, H]`, state `[H, V, K]`.
    Returns o `[T, H, V]` and the state after the last token.
    """
    length = q.shape[0]
    padding = -length % size
    if padding:
        q, k, v, g = (torch.cat([x, x.new_zeros(padding, *x.shape[1:])]) for x in (q, k, v, g))
        beta = torch.cat([beta, beta.new_zeros(padding, beta.shape[1])])
    q, k, v, g = (x.unflatten(0, (-1, size)).transpose(1, 2) for x in (q, k, v, g))
    beta = beta.unflatten(0, (-1, size)).transpose(1, 2)[..., None]
    total = g.cumsum(2)
    forward, backward = k * total.exp(), k * (-total).exp()
    reading = q * total.exp()
    closing = k * (total[:, :, -1:] - total).exp()
    decay = total[:, :, -1].exp()
    system = (forward @ backward.transpose(2, 3)).tril(-1) * beta
    system += torch.eye(size, device=q.device)
    local = (reading @ backward.transpose(2, 3)).tril()
    out = torch.empty_like(v)
    for index in range(q.shape[0]):
        residual = (v[index] - forward[index] @ state.transpose(1, 2)) * beta[index]
        update = torch.linalg.solve_triangular(system[index], residual, upper=False)
        out[index] = reading[index] @ state.transpose(1, 2) + local[index] @ update
        state = state * decay[index][:, None, :] + update.transpose(1, 2) @ closing[index]
    return out.transpose(1, 2).flatten(0, 1)[:length], state
