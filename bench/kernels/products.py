"""`python -m kernels.products`: the ways to run many tokens of the experts, timed side by side.

Tiles multiplied by warpgroups (Hopper only), by warps (every architecture) and the streaming
kernels over 128 tokens at a time.
"""

from __future__ import annotations

from functools import partial

import torch

from glm_exl3.ops import cuda_backend
from glm_exl3.ops.tuning import STREAMED, TILED, Step
from kernels import inputs
from kernels.cases import EXPERTS, HIDDEN, LIMIT, ROUTED, TOP_K
from kernels.timing import median_us

WAYS = {
    "warpgroup": Step(TILED, product="warpgroup"),
    "warp": Step(TILED, product="warp"),
    "streamed": Step(STREAMED),
}
TOKENS = (256, 1024, 4096)


def ways() -> dict[str, Step]:
    """Those the GPU at hand has."""
    hopper = torch.cuda.get_device_capability()[0] == 9
    return {name: step for name, step in WAYS.items() if hopper or step.product != "warpgroup"}


def main() -> None:
    for case in (ROUTED[0], ROUTED[2]):
        generator = torch.Generator("cuda").manual_seed(case.bits)
        width, last_dim = case.intermediate, 16 * case.bits
        w13 = inputs.random_stack((EXPERTS, 2), HIDDEN, width, last_dim, case.codebook, generator)
        w2 = inputs.random_stack((EXPERTS,), width, HIDDEN, last_dim, case.codebook, generator)
        stacks = cuda_backend.prepare_moe(w13, w2)
        for m in TOKENS:
            call = inputs.random_routing(m, HIDDEN, EXPERTS, TOP_K, generator)
            run = partial(cuda_backend.moe, call.x, call.ids, call.weights, *stacks, LIMIT)
            times = {name: median_us([partial(run, how=how)], 5) for name, how in ways().items()}
            text = ", ".join(f"{name} {us:.0f} us" for name, us in times.items())
            print(f"K{case.bits} {case.codebook.value} I={width} M={m}: {text}", flush=True)


if __name__ == "__main__":
    main()
