"""Causal convolution against torch's, and the roll-back of rejected drafts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glm_exl3.ref import conv

CHANNELS, WIDTH = 6, 4


def weights(seed: int = 0) -> torch.Tensor:
    return torch.randn(CHANNELS, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_prefill_equals_a_grouped_convolution():
    inputs, weight = torch.randn(CHANNELS, 11), weights()
    bias = torch.randn(CHANNELS)
    padded = F.pad(inputs, (WIDTH - 1, 0))
    expected = F.silu(F.conv1d(padded[None], weight[:, None], bias, groups=CHANNELS)[0])
    out, last = conv.prefill(inputs, torch.zeros(CHANNELS, WIDTH - 1), weight, bias)
    torch.testing.assert_close(out, expected)
    assert torch.equal(last, inputs[:, -3:])


def test_two_prefills_equal_one():
    inputs, weight = torch.randn(CHANNELS, 9), weights()
    history = torch.zeros(CHANNELS, WIDTH - 1)
    whole, end = conv.prefill(inputs, history, weight, None)
    first, middle = conv.prefill(inputs[:, :2], history, weight, None)
    second, last = conv.prefill(inputs[:, 2:], middle, weight, None)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    assert torch.equal(last, end)


def test_a_verify_step_continues_from_the_accepted_tokens():
    generator = torch.Generator().manual_seed(5)
    weight, drafts = weights(), 3
    state = torch.zeros(1, CHANNELS, WIDTH - 1 + drafts)
    accepted, kept = torch.ones(1, dtype=torch.int64), []
    for count in (2, 4, 1, 3, 4):
        inputs = torch.randn(1, CHANNELS, drafts + 1, generator=generator)
        out, columns = conv.step(inputs, state, accepted, weight, None)
        state[:, :, : columns.shape[2]] = columns
        history = torch.cat([torch.zeros(CHANNELS, WIDTH - 1), *kept], 1)[:, -(WIDTH - 1) :]
        expected, _ = conv.prefill(inputs[0], history, weight, None)
        assert torch.equal(out[0], expected)
        accepted = torch.tensor([count])
        kept.append(inputs[0, :, :count])
