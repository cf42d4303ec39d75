"""KDA layers: vLLM's kernel functions on `ref.kda` and `ref.conv`, with paged states.

The signatures are those of the functions that `glm5next.common.kda` imports. A state index of 0 is
vLLM's null block: it is neither read nor written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glm_exl3.ref import conv, kda


def _rows(cumulative: Tensor) -> list[int]:
    return [int(value) for value in cumulative.tolist()]


def _pad(values: Tensor, starts: list[int], longest: int) -> Tensor:
    """`[T, ...]` tokens to `[R, longest, ...]`, zeros behind the end of each request."""
    count = len(starts) - 1
    if count * longest == values.shape[0] == starts[-1]:
        return values.unflatten(0, (count, longest))
    padded = values.new_zeros(count, longest, *values.shape[1:])
    for row in range(count):
        size = starts[row + 1] - starts[row]
        padded[row, :size] = values[starts[row] : starts[row + 1]]
    return padded


def _unpad(values: Tensor, starts: list[int], out: Tensor) -> None:
    for row in range(len(starts) - 1):
        size = starts[row + 1] - starts[row]
        out[starts[row] : starts[row + 1]] = values[row, :size]


def chunk_kda_with_fused_gate(  # noqa: PLR0913, PLR0917 - vLLM's signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    A_log: Tensor,  # noqa: N803 - vLLM passes it by this name
    g_bias: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    scale: float | None = None,
    lower_bound: float = -5.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Prefill: outputs `[1, T, H, V]` and the final state of each request, fp32."""
    factor = k.shape[-1] ** -0.5 if scale is None else scale
    queries, keys, values = kda.normalise(q[0]) * factor, kda.normalise(k[0]), v[0].float()
    gate = kda.bounded_gate(raw_g[0], A_log, g_bias, lower_bound)
    steps = beta[0].float()
    out = torch.empty_like(v)
    finals = torch.empty_like(initial_state, dtype=torch.float32)
    starts = _rows(cu_seqlens)
    size = min(16, kda.chunk_length(lower_bound))
    for row in range(len(starts) - 1):
        part = slice(starts[row], starts[row + 1])
        out[0, part], finals[row] = kda.chunked(
            queries[part],
            keys[part],
            values[part],
            gate[part],
            steps[part],
            initial_state[row].float(),
            size,
        )
    return out, finals


def fused_recurrent_kda(  # noqa: PLR0913, PLR0917 - vLLM's signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    a_log: Tensor,
    g_bias: Tensor,
    scale: float | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    sigmoid_beta: bool = False,
    lower_bound: float = -5.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Decode or verify: reads the state of the last accepted token, stores one after each token."""
    starts = _rows(cu_seqlens)
    count = len(starts) - 1
    longest = max((starts[row + 1] - starts[row] for row in range(count)), default=0)
    out = torch.empty_like(v) if out is None else out
    if longest == 0:
        return out, initial_state
    used = slice(0, starts[-1])
    factor = k.shape[-1] ** -0.5 if scale is None else scale
    queries = _pad(kda.normalise(q[0, used]) * factor, starts, longest)
    keys = _pad(kda.normalise(k[0, used]), starts, longest)
    values = _pad(v[0, used].float(), starts, longest)
    decay = _pad(kda.bounded_gate(g[0, used], a_log, g_bias, lower_bound).exp(), starts, longest)
    steps = beta[0, used].float()
    steps = _pad(steps.sigmoid() if sigmoid_beta else steps, starts, longest)
    table = ssm_state_indices[:count].long()
    table = table[:, None] if table.ndim == 1 else table
    source = table[:, 0]
    if num_accepted_tokens is not None:
        source = table.gather(1, (num_accepted_tokens[:count].long() - 1)[:, None])[:, 0]
    state = initial_state[source.clamp_min(0)].float().flatten(0, 1)
    result = torch.empty_like(values)
    for token in range(longest):
        o, state = kda.step(
            state,
            queries[:, token].flatten(0, 1),
            keys[:, token].flatten(0, 1),
            values[:, token].flatten(0, 1),
            decay[:, token].flatten(0, 1),
            steps[:, token].flatten(),
        )
        result[:, token] = o.unflatten(0, (count, -1))
        _store(initial_state, table[:, min(token, table.shape[1] - 1)], state, starts, token)
    _unpad(result.to(out.dtype), starts, out[0])
    return out, initial_state


def _store(cache: Tensor, targets: Tensor, state: Tensor, starts: list[int], token: int) -> None:
    values = state.unflatten(0, (targets.shape[0], -1))
    for row, target in enumerate(targets.tolist()):
        if target > 0 and token < starts[row + 1] - starts[row]:
            cache[target] = values[row].to(cache.dtype)


def gather_initial_states(state: Tensor, indices: Tensor, has_initial_state: Tensor) -> Tensor:
    """States `[R, ...]` at `indices`, zeros where a request has none yet."""
    found = state[indices.long().clamp_min(0)]
    keep = has_initial_state.view(-1, *[1] * (found.ndim - 1))
    return torch.where(keep, found, torch.zeros((), dtype=found.dtype))


def scatter_states(state: Tensor, src: Tensor, indices: Tensor) -> None:
    """Store `src[r]` at block `indices[r]`, except at the null block."""
    for row, target in enumerate(indices.tolist()):
        if target > 0:
            state[target] = src[row].to(state.dtype)


def _no_warmup(**_: Any) -> None:
    """`scatter_states` is a warm-up owner in vLLM; there is nothing to compile here."""


scatter_states.register_warmup = _no_warmup  # type: ignore[attr-defined]


def causal_conv1d_fn(  # noqa: PLR0913, PLR0917 - vLLM's signature
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | None = "silu",
    **_: Any,
) -> Tensor:
    """Prefill: x `[C, T]` of all requests, states `[blocks, C, L]`; outputs `[C, T]`."""
    out = torch.empty_like(x)
    starts = _rows(query_start_loc)
    width = weight.shape[1] - 1
    fresh = has_initial_state.tolist()
    for row, block in enumerate(cache_indices[: len(starts) - 1].tolist()):
        part = slice(starts[row], starts[row + 1])
        if part.start == part.stop or block <= 0:
            continue
        history = conv_states[block, :, :width]
        history = history if fresh[row] else torch.zeros_like(history)
        out[:, part], last = conv.prefill(
            x[:, part], history, weight, bias, silu=activation in ("silu", "swish")
        )
        conv_states[block, :, :width] = last.to(conv_states.dtype)
    return out


def causal_conv1d_update(  # noqa: PLR0913, PLR0917 - vLLM's signature
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    **_: Any,
) -> Tensor:
    """Decode or verify: x `[T, C]`, one state per request, rolled back to the accepted tokens."""
    indices = (
        torch.arange(conv_state.shape[0]) if conv_state_indices is None else conv_state_indices
    )
    count = indices.shape[0]
    starts = (
        list(range(count + 1)) if query_start_loc is None else _rows(query_start_loc)[: count + 1]
    )
    longest = max(starts[row + 1] - starts[row] for row in range(count))
    accepted = torch.ones(count, dtype=torch.int64)
    if num_accepted_tokens is not None:
        accepted = num_accepted_tokens[:count]
    inputs = _pad(x[: starts[-1]], starts, longest).transpose(1, 2)
    state = conv_state[indices.long().clamp_min(0)]
    result, columns = conv.step(
        inputs, state, accepted, weight, bias, silu=activation in ("silu", "swish")
    )
    for row, block in enumerate(indices.tolist()):
        if block > 0:
            conv_state[block, :, : columns.shape[2]] = columns[row].to(conv_state.dtype)
    out = torch.empty_like(x)
    _unpad(result.transpose(1, 2), starts, out)
    return out
