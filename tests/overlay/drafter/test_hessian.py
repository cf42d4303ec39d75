"""Synthetic inputs follow the drafter's own operations."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_exl3.drafter.hessian import Shape, attended, convolved, layer_hessians
from glm_exl3.ref.tiny.drafting import grouped_conv

SHAPE = Shape(heads=4, kv_heads=2, head_dim=16, taps=3, group=8, block=4)
HIDDEN = 32


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    found = {}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found[f"layers.0.{norm}.weight"] = made(HIDDEN)
    for name, size in {"q": (64, 32), "k": (32, 32), "v": (32, 32), "o": (32, 64)}.items():
        found[f"layers.0.self_attn.{name}_proj.weight"] = made(*size)
    for name, size in {"gate": (96, 32), "up": (96, 32), "down": (32, 96)}.items():
        found[f"layers.0.mlp.{name}_proj.weight"] = made(*size)
    for conv in ("attention_conv", "mlp_conv"):
        found[f"layers.0.{conv}.base_kernel"] = made(2, 3, HIDDEN)
        found[f"layers.0.{conv}.kernel_projection.weight"] = made(24, HIDDEN)
    return found


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), blocks=st.integers(1, 4))
def test_the_convolution_is_that_of_the_drafter(seed: int, blocks: int) -> None:
    held = weights(seed)
    rows = torch.randn(4 * blocks, HIDDEN, generator=torch.Generator().manual_seed(seed))
    got = convolved(held.__getitem__, "layers.0.mlp_conv", rows, SHAPE)
    base = held["layers.0.mlp_conv.base_kernel"][0]
    projected = rows @ held["layers.0.mlp_conv.kernel_projection.weight"].T
    delta = projected.view(len(rows), 2, 3, -1)[:, 0]
    want = [grouped_conv(x, d, base, 8) for x, d in zip(rows.split(4), delta.split(4), strict=True)]
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-4, atol=1e-4)


def test_a_head_averages_the_values_of_its_own_key_value_head() -> None:
    values = torch.zeros(8, 32)
    values[:, 16:] = 1.0
    got = attended(values, SHAPE, torch.Generator().manual_seed(0))
    assert got.shape == (8, 64)
    assert not got[:, :32].any()
    torch.testing.assert_close(got[:, 32:], torch.ones(8, 32))


def test_every_packed_matrix_of_a_layer_has_its_metric() -> None:
    held = weights(1)
    found = layer_hessians(held.__getitem__, 0, SHAPE, 3, torch.device("cpu"))
    inputs = {name.removesuffix(".weight"): one.shape[1]
              for name, one in held.items() if one.dim() == 2}  # fmt: skip
    skipped = {"layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj", "layers.0.mlp.up_proj"}
    assert {name: one.shape[0] for name, one in found.items()} == {
        name: size for name, size in inputs.items() if name not in skipped
    }
    for metric in found.values():
        assert torch.linalg.eigvalsh(metric.double()).min() > -1e-3 * metric.diagonal().max()
    again = layer_hessians(held.__getitem__, 0, SHAPE, 3, torch.device("cpu"))
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_a_norm_shows_in_the_metric_behind_it() -> None:
    held = weights(2)
    found = layer_hessians(held.__getitem__, 0, SHAPE, 3, torch.device("cpu"))
    level = found["layers.0.attention_conv.kernel_projection"].diagonal()
    scale = held["layers.0.input_layernorm.weight"].square()
    ratio = level / scale
    assert ratio.max() / ratio.min() < 2
