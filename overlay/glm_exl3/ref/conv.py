"""Depthwise causal convolution of KDA, with the state that speculative decoding rolls back.

What: a width-W convolution per channel over time. Why this shape: W is 4, so W shifted products
are cheaper than a convolution call and give one token the same bits whether it comes alone, in a
verify step or in a prefill.

State: `[C, L]` raw inputs, oldest first, with L >= W - 1. After a prefill the first W - 1 columns
are the last inputs. After a step of n tokens the first W - 2 + n columns are the W - 2 inputs
before the step and then the step's inputs; the next step starts at column `accepted - 1` and so
sees exactly the inputs up to the last accepted token. Source: vLLM's causal_conv1d kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(window: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Inputs with their history `[..., C, W - 1 + T]`, weights `[C, W]` -> fp32 `[..., C, T]`."""
    width = weight.shape[1]
    length = window.shape[-1] - width + 1
    wide, taps = window.float(), weight.float()
    out = wide[..., :length] * taps[:, 0, None]
    for tap in range(1, width):
        out += wide[..., tap : tap + length] * taps[:, tap, None]
    if bias is not None:
        out += bias.float()[:, None]
    return F.silu(out) if silu else out


def prefill(
    inputs: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """Convolve a run of T tokens.

    inputs `[C, T]`, history `[C, W - 1]` (zeros for a fresh sequence).
    Returns the outputs `[C, T]` in `inputs.dtype` and the history for the next run.
    """
    window = torch.cat([history.to(inputs.dtype), inputs], dim=1)
    out = convolve(window, weight, bias, silu)
    return out.to(inputs.dtype), window[:, window.shape[1] - history.shape[1] :]


def step(
    inputs: Tensor,
    state: Tensor,
    accepted: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    silu: bool = True,
) -> tuple[Tensor, Tensor]:
    """Convolve one decode or verify step of R sequences.

    inputs `[R, C, N]` (rows shorter than N padded behind), state `[R, C, L]` with
    L >= W - 2 + N, accepted `[R]`: tokens of the previous step that were kept (1 without drafts).
    Returns outputs `[R, C, N]` and the leading columns `[R, C, W - 2 + N]` of the new state.
    """
    width = weight.shape[1]
    columns = (accepted - 1).long()[:, None] + torch.arange(width - 1, device=state.device)
    columns = columns[:, None, :].expand(-1, state.shape[1], -1)
    history = state.gather(2, columns).to(inputs.dtype)
    window = torch.cat([history, inputs], dim=2)
    out = convolve(window, weight, bias, silu)
    return out.to(inputs.dtype), window[:, :, 1:]
