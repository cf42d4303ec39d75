"""What a KDA layer needs before its recurrence, in one launch for a decode step.

What: the depthwise convolution of q, k and v with its state (`ref.conv.step` for one token) and the
two low-rank gate projections behind `f_a` and `g_a`. They do not depend on each other, so programs
of one grid share the work: some take channels of a token, the others rows of a gate for all tokens.

Measured on one H200 (2026-11-29, real size, in a graph over 34 layers): 3.1, 3.6, 4.9 and 7.9 us at
1, 2, 4 and 8 tokens, the three launches it replaces 8.8 to 9.6; slower at 16.

What must stay true: block 0 is vLLM's null block; its tokens are padding, their state is not
touched and their outputs mean nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917 - Triton code is untyped

TAPS = 4
CHANNELS_AT_ONCE = 256
ROWS_AT_ONCE = 32
MAX_TOKENS = 8


@triton.jit
def _convolve(
    qkv, out, state, slots, weight, token, c, row_stride, block_stride, channel_stride, tap_stride,
    CHANNELS,
):  # fmt: skip
    slot = tl.load(slots + token).to(tl.int64)
    newest = tl.load(qkv + token * row_stride + c)
    value = newest.to(tl.float32)
    if slot != 0:
        history = state + slot * block_stride + c.to(tl.int64) * channel_stride
        first = tl.load(history)
        second = tl.load(history + tap_stride)
        third = tl.load(history + 2 * tap_stride)
        taps = weight + c * 4
        value = first.to(tl.float32) * tl.load(taps) + second.to(tl.float32) * tl.load(taps + 1)
        value += third.to(tl.float32) * tl.load(taps + 2)
        value += newest.to(tl.float32) * tl.load(taps + 3)
        value = value * tl.sigmoid(value)
        tl.store(history, second)
        tl.store(history + tap_stride, third)
        tl.store(history + 2 * tap_stride, newest.to(first.dtype))
    tl.store(out + token * CHANNELS + c, value.to(tl.bfloat16))


@triton.jit
def _gate(low, low_stride, weight, out, tokens, rows, WIDTH: tl.constexpr, FEATURES: tl.constexpr):
    k = tl.arange(0, WIDTH)
    tile = tl.load(weight + rows[:, None] * WIDTH + k[None, :]).to(tl.float32)
    for token in range(tokens):
        x = tl.load(low + token * low_stride + k).to(tl.float32)
        y = tl.sum(tile * x[None, :], axis=1)
        tl.store(out + token * FEATURES + rows, y.to(tl.bfloat16))


@triton.jit
def _inputs_kernel(
    qkv,
    conv_out,
    state,
    slots,
    conv_weight,
    f_low,
    g_low,
    f_weight,
    g_weight,
    f_out,
    g_out,
    tokens,
    row_stride,
    low_stride,
    block_stride,
    channel_stride,
    tap_stride,
    CHANNELS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS_AT_ONCE: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    program = tl.program_id(0)
    slices: tl.constexpr = CHANNELS // CHANNELS_AT_ONCE
    gates: tl.constexpr = FEATURES // ROWS_AT_ONCE
    if program < gates:
        rows = program * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
        _gate(f_low, low_stride, f_weight, f_out, tokens, rows, WIDTH, FEATURES)
    elif program < 2 * gates:
        rows = (program - gates) * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
        _gate(g_low, low_stride, g_weight, g_out, tokens, rows, WIDTH, FEATURES)
    else:
        part = program - 2 * gates
        c = (part % slices) * CHANNELS_AT_ONCE + tl.arange(0, CHANNELS_AT_ONCE)
        _convolve(
            qkv, conv_out, state, slots, conv_weight, part // slices, c, row_stride, block_stride,
            channel_stride, tap_stride, CHANNELS,
        )  # fmt: skip


def takes(qkv: Tensor, f_weight: Tensor, conv_weight: Tensor) -> bool:
    """Whether the kernel is made for a step with these tensors."""
    return (
        0 < qkv.shape[0] <= MAX_TOKENS
        and qkv.dtype is torch.bfloat16
        and f_weight.dtype is torch.bfloat16
        and f_weight.is_contiguous()
        and conv_weight.shape[1] == TAPS
        and qkv.shape[1] % CHANNELS_AT_ONCE == 0
        and f_weight.shape[0] % ROWS_AT_ONCE == 0
    )


def inputs(
    qkv: Tensor,
    state: Tensor,
    slots: Tensor,
    conv_weight: Tensor,
    low: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved q, k, v `[T, C]` and the two gates `[P, F]`, all bf16; `state` advances in place.

    qkv bf16 `[T, C]` with unit column stride; state `[blocks, C, 3]` in any strides, slots int32
    `[T]` (its block per token); conv_weight fp32 `[C, 4]`; low: f_a and g_a outputs `[P, W]` of one
    row stride, P >= T; weights: f_b and g_b bf16 `[F, W]`.
    """
    tokens, channels = qkv.shape
    padded, (features, width) = low[0].shape[0], weights[0].shape
    conv_out = torch.empty(tokens, channels, dtype=torch.bfloat16, device=qkv.device)
    gates = [torch.empty(padded, features, dtype=torch.bfloat16, device=qkv.device) for _ in low]
    programs = 2 * (features // ROWS_AT_ONCE) + tokens * (channels // CHANNELS_AT_ONCE)
    _inputs_kernel[programs,](
        qkv,
        conv_out,
        state,
        slots,
        conv_weight,
        *low,
        *weights,
        *gates,
        padded,
        qkv.stride(0),
        low[0].stride(0),
        *state.stride(),
        CHANNELS=channels,
        FEATURES=features,
        WIDTH=width,
        CHANNELS_AT_ONCE=CHANNELS_AT_ONCE,
        ROWS_AT_ONCE=ROWS_AT_ONCE,
        num_warps=4,
    )
    return conv_out, gates[0], gates[1]
