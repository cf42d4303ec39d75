"""`python -m kernels.peer.check LIBRARY`: the peer's answers against ours.

What the table times must be the same product. One or two mul1 tokens are left out: the peer rounds
their activations to eight bits, and the table has no such row.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ops import cuda_backend
from kernels import inputs
from kernels.peer import calls

TOLERANCE = 3e-2
LIMIT = 10.0


def difference(found: torch.Tensor, ours: torch.Tensor) -> float:
    """Relative Frobenius distance."""
    return float((found.double() - ours.double()).norm() / ours.double().norm())


def linear_lines(generator: torch.Generator) -> list[tuple[str, float]]:
    lines = []
    for bits, codebook in ((4, Codebook.MCG), (6, Codebook.MCG), (4, Codebook.MUL1)):
        matrix = inputs.random_matrix(4096, 2048, 16 * bits, codebook, generator)
        for tokens in (8, 64, 512, 2048) if codebook is Codebook.MUL1 else (1, 8, 64, 512, 2048):
            x = torch.randn(tokens, 4096, device="cuda", generator=generator).half()
            found = calls.linear(x, matrix)()
            name = f"linear K{bits} {codebook.value} M={tokens}"
            lines.append((name, difference(found, cuda_backend.linear(x, matrix))))
    return lines


def moe_lines(generator: torch.Generator) -> list[tuple[str, float]]:
    lines = []
    for bits, codebook in ((4, Codebook.MCG), (3, Codebook.MUL1)):
        w13 = inputs.random_stack((32, 2), 4096, 2048, 16 * bits, codebook, generator)
        w2 = inputs.random_stack((32,), 2048, 4096, 16 * bits, codebook, generator)
        ours = cuda_backend.prepare_moe(w13, w2)
        experts = calls.Experts.of(w13, w2, LIMIT)
        for tokens in (1, 8, 64, 1024):
            call = inputs.random_routing(tokens, 4096, 32, 8, generator, torch.float16)
            wanted = cuda_backend.moe(call.x, call.ids, call.weights, *ours, LIMIT)
            for path in calls.moe(call, experts):
                name = f"moe K{bits} {codebook.value} M={tokens} {path.__qualname__.split('.')[0]}"
                lines.append((name, difference(path(), wanted)))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the peer's answers with ours.")
    parser.add_argument("library", type=Path)
    calls.load(parser.parse_args().library)
    generator = torch.Generator("cuda").manual_seed(1)
    bad = 0
    for part in (linear_lines, moe_lines):
        for name, distance in part(generator):
            agrees = distance < TOLERANCE
            bad += not agrees
            print(f"{name:32} {distance:.2e} {'' if agrees else 'DIFFERS'}", flush=True)
    torch.cuda.synchronize()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
