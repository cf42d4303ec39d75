"""The seam's Triton kernel under Triton's interpreter against `ref`; run by test_mhc_seam.py."""

from __future__ import annotations

import json
import sys

import torch

from glm_exl3.fused import seam_triton
from glm_exl3.ref import mhc

PARAMETERS = mhc.HyperParameters(1e-5, 1e-6, 1e-6, 2.0, 20)


def errors(tokens: int, hidden: int) -> list[float]:
    random = torch.Generator().manual_seed(hidden + tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    common = [
        normal(tokens, hidden).bfloat16(),
        normal(tokens, 4, hidden).bfloat16(),
        normal(tokens, 4, 1).sigmoid() * 2,
        normal(tokens, 4, 4).softmax(-1),
    ]
    fn, scale = normal(24, 4 * hidden) * 0.02, normal(3).abs() + 0.5
    base, norm = normal(24) * 0.5, (1 + 0.1 * normal(hidden)).bfloat16()
    assert seam_triton.takes(common[1], norm)
    found = seam_triton.seam(*common, fn, scale, base, PARAMETERS, norm, 1e-5)
    streams = mhc.expand(*common)
    pre, post, comb = mhc.mixing_weights(streams, fn, scale, base, PARAMETERS)
    wanted = (streams, post, comb, mhc.collapse(streams, pre, norm, 1e-5))
    assert not seam_triton.counters(torch.device("cpu")).any()
    return [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(found, wanted, strict=True)
    ]


json.dump([errors(tokens, hidden) for tokens, hidden in ((1, 256), (2, 128), (1, 256))], sys.stdout)
