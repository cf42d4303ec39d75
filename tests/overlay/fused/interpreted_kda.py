"""The KDA input kernel under Triton's interpreter against `ref`; run by test_kda_inputs.py."""

from __future__ import annotations

import json
import sys

import torch

from glm_exl3.fused import kda_inputs
from glm_exl3.ref import conv

HEADS, WIDTH, PADDED, SLOTS = 2, 128, 4, (4, 0, 2)


def main() -> None:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    features, count = HEADS * WIDTH, len(SLOTS)
    projected = normal(PADDED, 3 * features + HEADS + 2 * WIDTH).bfloat16()
    qkv, _, f_low, g_low = projected.split([3 * features, HEADS, WIDTH, WIDTH], dim=-1)
    state = normal(6, 3, 3 * features).bfloat16().transpose(-1, -2)
    before, slots = state.clone(), torch.tensor(SLOTS, dtype=torch.int32)
    taps = normal(3 * features, 4) * 0.5
    weights = tuple((normal(features, WIDTH) / WIDTH**0.5).bfloat16() for _ in range(2))
    assert kda_inputs.takes(qkv[:count], weights[0], taps)
    mixed, *gates = kda_inputs.inputs(qkv[:count], state, slots, taps, (f_low, g_low), weights)
    wanted, advanced = conv.step(
        qkv[:count].unsqueeze(-1), before[slots.long()], torch.ones(count), taps, None
    )
    real = [index for index, slot in enumerate(SLOTS) if slot]
    distance = [
        float((gate.float() - low.float() @ weight.float().T).abs().max())
        for gate, low, weight in zip(gates, (f_low, g_low), weights, strict=True)
    ]
    report = {
        "convolved": float((mixed[real] - wanted[real, :, 0]).float().abs().max()),
        "gates": max(distance),
        "advanced": all(torch.equal(state[SLOTS[i]], advanced[i]) for i in real),
        "untouched": all(torch.equal(state[i], before[i]) for i in range(6) if i not in SLOTS[::2]),
    }
    json.dump(report, sys.stdout)


main()
