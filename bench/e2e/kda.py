"""Time the fused inputs of a KDA decode step against the launches they replace.

    python -m e2e.kda RESULT.json

Both sides are timed per layer inside a CUDA graph over many layers' weights, at the real size: two
projections 128 -> 8192 and a convolution over 24,576 channels.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from e2e.seam import graph_us, measure_each

CHANNELS, FEATURES, WIDTH, HEADS, LAYERS, BLOCKS = 24576, 8192, 128, 64, 34, 40


def layer(random: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights and state of one layer."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=random)

    return {
        "f": (normal(FEATURES, WIDTH) / WIDTH**0.5).bfloat16(),
        "g": (normal(FEATURES, WIDTH) / WIDTH**0.5).bfloat16(),
        "taps": normal(CHANNELS, 4) * 0.5,
        "state": normal(BLOCKS, 3, CHANNELS).bfloat16().transpose(-1, -2),
    }


def measure(tokens: int) -> dict[str, Any]:
    """Both times and the largest difference for one token count."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    from glm_exl3.fused import kda_inputs

    random = torch.Generator("cuda").manual_seed(tokens)
    layers = [layer(random) for _ in range(LAYERS)]
    behind = HEADS + 2 * WIDTH
    projected = torch.randn(tokens, CHANNELS + behind, device="cuda", generator=random).bfloat16()
    qkv, _, f_low, g_low = projected.split([CHANNELS, HEADS, WIDTH, WIDTH], dim=-1)
    slots = torch.arange(1, tokens + 1, dtype=torch.int32, device="cuda")

    def ours(one: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        weights = (one["f"], one["g"])
        return kda_inputs.inputs(qkv, one["state"], slots, one["taps"], (f_low, g_low), weights)

    def theirs(one: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        gates = (F.linear(f_low, one["f"]), F.linear(g_low, one["g"]))
        state, taps, out = one["state"], one["taps"], torch.empty_like(qkv)
        mixed = causal_conv1d_update(
            qkv, state, taps, None, activation="silu", conv_state_indices=slots, out=out
        )
        return (mixed, *gates)

    kept = layers[0]["state"].clone()
    found = ours(layers[0])
    layers[0]["state"].copy_(kept)
    wanted = theirs(layers[0])
    row: dict[str, Any] = {"tokens": tokens}
    row["difference"] = [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(found, wanted, strict=True)
    ]
    for name, call in (("ours", ours), ("vllm", theirs)):
        row[f"{name}_us"] = graph_us(call, layers)
    return row


def main() -> None:
    measure_each(measure, (1, 2, 4, 8), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
