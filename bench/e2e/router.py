"""Time the fused router of a decode step against the launches it replaces.

    python -m e2e.router RESULT.json

Both sides are timed per layer inside a CUDA graph over the gates of 42 layers, at the real size:
288 experts, hidden size 4096, top-8.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from e2e.seam import graph_us, measure_each

EXPERTS, HIDDEN, TOP_K, SCALE, LAYERS = 288, 4096, 8, 2.5, 42
AT_ONCE, WARPS = (1, 2, 4), (4, 8)


def layers(random: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gate and correction bias of every layer."""
    return [
        (
            (torch.randn(EXPERTS, HIDDEN, device="cuda", generator=random) / 64).bfloat16(),
            torch.randn(EXPERTS, device="cuda", generator=random) * 0.1,
        )
        for _ in range(LAYERS)
    ]


def measure(tokens: int) -> dict[str, Any]:
    """Both times and whether the same experts were chosen, for one token count."""
    from vllm import _custom_ops as ops

    from glm_exl3.fused import router
    from glm_exl3.ref.router import route

    random = torch.Generator("cuda").manual_seed(tokens)
    gates = layers(random)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=random).bfloat16()

    def ours(layer: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return router.route(x, *layer, TOP_K, SCALE)

    def theirs(layer: tuple[torch.Tensor, torch.Tensor]) -> Any:
        weight, bias = layer
        logits = torch.mm(x, weight.T, out_dtype=torch.float32)
        return ops.grouped_topk(logits, 1, 1, TOP_K, True, SCALE, bias, 1)

    found, (_, weights, ids) = ours(gates[0]), route(x, *gates[0], TOP_K, SCALE)
    row: dict[str, Any] = {"tokens": tokens, "same_experts": torch.equal(found.ids, ids)}
    row["weights_error"] = float((found.weights - weights).abs().max())
    row["vllm_us"] = graph_us(theirs, gates)
    for at_once in AT_ONCE:
        for warps in WARPS:
            router.EXPERTS_AT_ONCE, router.WARPS = at_once, warps
            row[f"ours_us_{at_once}x{warps}"] = graph_us(ours, gates)
    return row


def main() -> None:
    measure_each(measure, (1, 2, 4, 8), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
