"""Merged layers whose parts share one operation give what the separate products give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from glm_exl3.ops import library, table
from glm_exl3.quant import together
from glm_exl3.quant.linear import Term
from glm_exl3.ref.moe import swiglu_clamped

WIDTH, LIMIT = 256, 0.5


class SiluAndMulWithClamp(torch.nn.Module):
    """vLLM's activation without its configuration."""

    swiglu_limit, alpha, beta = LIMIT, 1.0, 0.0

    def forward(self, x):
        return swiglu_clamped(*x.chunk(2, dim=-1), LIMIT)


class Mlp(torch.nn.Module):
    """The part of vLLM's MLP that is looked for."""

    def __init__(self, gate_up_proj):
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.act_fn = SiluAndMulWithClamp()

    def forward(self, x):
        return self.act_fn(self.gate_up_proj(x)[0])


@pytest.fixture
def mlp(monkeypatch, packed, exl3_config, at_rank, load):
    """Builds an MLP whose gate and up stay packed under a value of the setting."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    row = replace(table.row("reference"), dense_on_load=())
    monkeypatch.setattr(table, "choose", lambda device: row)
    gate, up = packed(128, WIDTH, 5), packed(128, WIDTH, 5)
    at_rank(0, 1)

    def build(setting: str, name: str = "m") -> Mlp:
        config = exl3_config(gate.named(f"{name}.gate_proj") | up.named(f"{name}.up_proj"))
        monkeypatch.setenv("GLM_EXL3_TOGETHER", setting)
        layer = MergedColumnParallelLinear(
            128,
            [WIDTH] * 2,
            bias=False,
            quant_config=config,
            prefix=f"{name}.gate_up_proj",
            params_dtype=torch.bfloat16,
        )
        built = Mlp(layer)
        together.join_activations(built)
        load(layer, gate.tensors, 0)
        load(layer, up.tensors, 1)
        layer.quant_method.process_weights_after_loading(layer)
        return built

    return build


@pytest.fixture
def limits(monkeypatch) -> list[float | None]:
    """The limit of every call of the operation."""
    found, real = [], library.parts

    def parts(x, matrices, limit, backend):
        found.append(limit)
        return real(x, matrices, limit, backend)

    monkeypatch.setattr(library, "parts", parts)
    return found


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize("count", [1, 8, 9])
def test_parts_together_have_the_bits_of_parts_apart(count, mlp, limits):
    apart, joined = mlp("none").gate_up_proj, mlp("parts").gate_up_proj
    assert torch.equal(joined(tokens(count))[0], apart(tokens(count))[0])
    assert limits == [None]


@pytest.mark.parametrize("count", [1, 70])
def test_parts_apart_are_one_operation_too(count, mlp, limits, monkeypatch):
    """So that the back end may write every product into its columns."""
    calls, real = [], library.side_by_side

    def side_by_side(x, matrices, own_rows, backend):
        calls.append((len(matrices), own_rows, backend))
        return real(x, matrices, own_rows, backend)

    monkeypatch.setattr(library, "side_by_side", side_by_side)
    layer, x = mlp("none").gate_up_proj, tokens(count)
    assert torch.equal(layer(x)[0], torch.cat(layer.exl3.products(x), dim=-1))
    assert calls == [(2, False, "reference")]
    assert limits == []


@pytest.mark.parametrize("count", [1, 8])
def test_few_tokens_leave_gate_and_up_activated(count, mlp, limits):
    apart, joined = mlp("none"), mlp("parts,activation")
    x = tokens(count)
    assert joined.gate_up_proj(x)[0].shape == (count, WIDTH)
    torch.testing.assert_close(joined(x), apart(x), rtol=2**-6, atol=1e-4)
    assert limits == [LIMIT, LIMIT]


def test_more_tokens_are_activated_by_vllm(mlp, limits):
    apart, joined = mlp("none"), mlp("parts,activation")
    assert torch.equal(joined(tokens(9)), apart(tokens(9)))
    assert limits == [None]


def test_nothing_is_joined_unless_asked(mlp, limits):
    assert isinstance(mlp("").act_fn, SiluAndMulWithClamp)
    assert isinstance(mlp("activation").act_fn, together.Activated)
    for setting in ("none", "activation", "dense"):
        mlp(setting)(tokens(1))
    assert limits == []


def test_shared_experts_are_left_out_unless_named(mlp, limits):
    name, x = "m.mlp.shared_experts", tokens(1)
    alone = mlp("parts,activation", name)
    assert isinstance(alone.act_fn, SiluAndMulWithClamp)
    assert alone.gate_up_proj(x)[0].shape == (1, 2 * WIDTH)
    assert limits == []
    named = mlp("parts,activation,shared", name)
    assert named.gate_up_proj(x)[0].shape == (1, WIDTH)
    assert limits == [LIMIT]
    torch.testing.assert_close(named(x), alone(x), rtol=2**-6, atol=1e-4)


def test_what_may_share(monkeypatch, packed):
    one, two = Term(packed(128, 256).matrix, 256, 128), Term(packed(128, 128, 4).matrix, 128, 128)
    dense = Term(torch.zeros(24, 128), 24, 128)
    monkeypatch.setenv("GLM_EXL3_TOGETHER", "parts")
    assert together.share((one, two))
    assert not together.share((one,))
    assert not together.share((one, dense))
    monkeypatch.setenv("GLM_EXL3_TOGETHER", "parts,dense")
    assert together.share((one, dense))
    assert not together.share((dense, dense))
    assert not together.share((one, replace(two, width=100)))
    assert not together.share((one, replace(dense, inputs=120)))


def test_what_is_alike(packed):
    one, dense = Term(packed(128, 256).matrix, 256, 128), Term(torch.zeros(24, 128), 24, 128)
    assert together.alike((one, one))
    assert together.alike((one, dense))
    for terms in ((one,), (one, replace(one, width=200)), (one, replace(dense, inputs=120))):
        assert not together.alike(terms)


def test_activations_with_factors_are_left_alone():
    other = SiluAndMulWithClamp()
    other.beta = 1.0
    assert not together._is_plain_swiglu(other)
    assert together._is_plain_swiglu(SiluAndMulWithClamp())
    assert not together._is_plain_swiglu(None)
