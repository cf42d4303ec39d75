"""vLLM's convolution of q, k and v at once and one by one under Triton's interpreter."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

from glm_exl3.fused import kda_prefill

HEADS, WIDTH, BLOCKS, STARTS, SLOTS = 2, 128, 5, (0, 3, 20), (4, 2)
P, COUNT = HEADS * WIDTH, STARTS[-1]


def main() -> None:
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(COUNT, 3 * P + 64, generator=random).bfloat16()[:, : 3 * P]
    weights = [torch.randn(P, 1, 4, generator=random) for _ in range(3)]
    together = torch.randn(BLOCKS, 3, 3 * P, generator=random).bfloat16().transpose(-1, -2)
    apart = together.clone()
    metadata = SimpleNamespace(
        has_initial_state=torch.tensor([False, True]),
        non_spec_state_indices_tensor=torch.tensor(SLOTS, dtype=torch.int32),
        non_spec_query_start_loc=torch.tensor(STARTS, dtype=torch.int32),
    )

    def without_metadata(*arguments: object, metadata: object, **more: object) -> torch.Tensor:
        found: torch.Tensor = causal_conv1d_fn(*arguments, **more)
        return found

    kda_prefill.causal_conv1d_fn = without_metadata
    convs = [SimpleNamespace(weight=weight, bias=None) for weight in weights]
    layer = SimpleNamespace(
        local_projection_size=P, local_num_heads=HEADS, head_dim=WIDTH,
        q_conv1d=convs[0], k_conv1d=convs[1], v_conv1d=convs[2],
    )  # fmt: skip
    wanted = causal_conv1d_fn(
        qkv.transpose(0, 1),
        torch.cat([weight.squeeze(1) for weight in weights]),
        None,
        conv_states=together,
        has_initial_state=metadata.has_initial_state,
        cache_indices=metadata.non_spec_state_indices_tensor,
        query_start_loc=metadata.non_spec_query_start_loc,
    ).transpose(0, 1)
    found = kda_prefill.convolved(layer, qkv, apart, metadata)
    report = {
        "same": torch.equal(torch.cat([part.view(COUNT, P) for part in found], dim=1), wanted),
        "dense": all(part.is_contiguous() for part in found),
        "advanced": torch.equal(apart, together),
        "alive": bool(wanted.abs().sum() > 0),
    }
    json.dump(report, sys.stdout)


main()
