"""Routed experts: the clamp's order, routing weights, expert maps, shards that sum to the whole."""

from __future__ import annotations

import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ref.decode import dequantize
from glm_exl3.ref.moe import Exl3Stack, exl3_moe, swiglu_clamped

EXPERTS, HIDDEN, WIDTH, TOP = 4, 128, 256, 2
LIMIT = 0.5


def stack(*shape: int, k: int, n: int, seed: int) -> Exl3Stack:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, (*shape, k // 16, n // 16, 64), generator=generator)
    suh = torch.randn(*shape, k, generator=generator) / k**0.5
    svh = torch.randn(*shape, n, generator=generator)
    return Exl3Stack(bits.to(torch.int16), suh.half(), svh.half(), Codebook.MCG)


W13 = stack(EXPERTS, 2, k=HIDDEN, n=WIDTH, seed=0)
W2 = stack(EXPERTS, k=WIDTH, n=HIDDEN, seed=1)
GENERATOR = torch.Generator().manual_seed(2)
X = torch.randn(6, HIDDEN, dtype=torch.float64, generator=GENERATOR)
IDS = torch.stack([torch.randperm(EXPERTS, generator=GENERATOR)[:TOP] for _ in range(6)])
WEIGHTS = torch.rand(6, TOP, dtype=torch.float64, generator=GENERATOR)


def weight(of: Exl3Stack, *at: int) -> torch.Tensor:
    return dequantize(of.trellis[at], of.suh[at], of.svh[at], of.codebook, torch.float64)


def expected(experts: range = range(EXPERTS)) -> torch.Tensor:
    out = torch.zeros_like(X)
    for token in range(X.shape[0]):
        for slot in range(TOP):
            expert = int(IDS[token, slot])
            if expert not in experts:
                continue
            gate, up = (X[token] @ weight(W13, expert, i) for i in (0, 1))
            hidden = swiglu_clamped(gate, up, LIMIT)
            out[token] += WEIGHTS[token, slot] * (hidden @ weight(W2, expert))
    return out


def test_the_gate_is_clamped_before_silu_and_only_from_above() -> None:
    gate, up = torch.tensor([20.0, -20.0]), torch.tensor([-30.0, 30.0])
    out = swiglu_clamped(gate, up, 10.0)
    silu = torch.nn.functional.silu
    assert out.tolist() == (silu(torch.tensor([10.0, -20.0])) * torch.tensor([-10, 10])).tolist()
    assert swiglu_clamped(gate, up, None)[0] == silu(gate[0]) * up[0]


def test_experts_equal_a_loop_over_tokens() -> None:
    assert torch.allclose(exl3_moe(X, IDS, WEIGHTS, W13, W2, LIMIT), expected(), atol=1e-9)


def test_an_expert_map_leaves_out_other_ranks() -> None:
    mapping = torch.tensor([-1, -1, 0, 1])
    w13 = Exl3Stack(W13.trellis[2:], W13.suh[2:], W13.svh[2:], W13.codebook)
    w2 = Exl3Stack(W2.trellis[2:], W2.suh[2:], W2.svh[2:], W2.codebook)
    out = exl3_moe(X, IDS, WEIGHTS, w13, w2, LIMIT, mapping)
    assert torch.allclose(out, expected(range(2, 4)), atol=1e-9)


def test_shards_of_the_width_sum_to_the_whole() -> None:
    parts = []
    for a, b in ((0, 128), (128, 256)):
        tiles = slice(a // 16, b // 16)
        w13 = Exl3Stack(W13.trellis[:, :, :, tiles], W13.suh, W13.svh[..., a:b], W13.codebook)
        w2 = Exl3Stack(W2.trellis[:, tiles], W2.suh[:, a:b], W2.svh, W2.codebook)
        parts.append(exl3_moe(X, IDS, WEIGHTS, w13, w2, LIMIT))
    assert torch.allclose(parts[0] + parts[1], expected(), atol=1e-9)
