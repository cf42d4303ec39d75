"""The 8-bit rows kernel under Triton's interpreter against `ref`; run by test_rows.py."""

from __future__ import annotations

import json
import sys

import torch

from glm_exl3.ops import recoded_rows
from glm_exl3.ref import recode

CASES = (("fp8", 1, 40, 384), ("fp8", 7, 32, 256), ("int8", 3, 20, 512), ("int8", 20, 16, 128))


def main() -> None:
    random = torch.Generator().manual_seed(0)
    report = []
    for scheme, tokens, n, k in CASES:
        weight = torch.randn(n, k, generator=random) * torch.rand(n, 1, generator=random)
        codes, scale = recode.quantize_rows(weight, scheme)
        if scheme == "fp8":
            raw = codes.view(torch.uint8)
            raw[:, :8] = torch.tensor([1, 7, 8, 0, 128, 129, 126, 254], dtype=torch.uint8)
        x = torch.randn(tokens, k, generator=random).bfloat16()
        got = recoded_rows.rows(x, codes, scale, precise=True)
        want = recode.linear(x, codes, scale)
        alone = recoded_rows.rows(x[:1], codes, scale, precise=True)
        report.append(
            {
                "error": float((got.float() - want.float()).norm() / want.float().norm()),
                "alone": bool(torch.equal(alone[0], got[0])) or tokens > recoded_rows.FEW.tokens,
            }
        )
    json.dump(report, sys.stdout)


main()
