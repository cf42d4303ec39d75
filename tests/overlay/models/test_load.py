"""Both families load into vLLM's model: every module gets the weights its checkpoint stores."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors import safe_open

from glm_exl3.quant.facts import read_facts


def dense_of(folder, module: str) -> torch.Tensor:
    """fp32 [n, k] of a packed or dense checkpoint module."""
    from glm_exl3.ref.decode import dequantize

    facts = read_facts(folder)

    def read(leaf: str) -> torch.Tensor:
        name = f"{module}.{leaf}"
        with safe_open(facts.file_of(name), "pt") as file:
            return file.get_tensor(name)

    layout = facts.modules.get(module)
    if layout is None:
        return read("weight").float()
    return dequantize(read("trellis"), read("suh"), read("svh"), layout.codebook).T


def weight_of(layer: torch.nn.Module) -> torch.Tensor:
    terms = layer.exl3.terms
    assert len(terms) == 1
    return terms[0].matrix.float()


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal up to one unit in the last place of bf16: cut and whole decode in different blocks."""
    torch.testing.assert_close(got, want.bfloat16().float(), rtol=2**-8, atol=0)


@pytest.mark.slow
def test_full_family_keeps_attention_packed(pristine, build) -> None:
    folder = pristine("full")
    model = build(folder)
    layers, stem = model.language_model.model.layers, "model.language_model.layers"
    kda, mla = layers[0].self_attn, layers[3].self_attn
    fused = dense_of(folder, f"{stem}.0.self_attn.qkv_proj")
    rest = [dense_of(folder, f"{stem}.0.self_attn.{n}_proj") for n in ("b", "f_a", "g_a")]
    same(weight_of(kda.in_proj_qkvbfg_a), torch.cat([fused, *rest]))
    same(weight_of(kda.o_proj), dense_of(folder, f"{stem}.0.self_attn.o_proj"))
    a = [dense_of(folder, f"{stem}.3.self_attn.{n}") for n in ("q_a_proj", "kv_a_proj_with_mqa")]
    same(weight_of(mla.fused_qkv_a_proj), torch.cat(a))
    for name in ("q_b_proj", "o_proj"):
        same(weight_of(getattr(mla, name)), dense_of(folder, f"{stem}.3.self_attn.{name}"))
    same(weight_of(mla.indexer.wq_b), dense_of(folder, f"{stem}.3.self_attn.indexer.wq_b"))
    same(weight_of(model.language_model.lm_head), dense_of(folder, "lm_head"))
    shared = layers[1].mlp.experts._shared_experts
    assert shared is not None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tr3", "full"])
def test_experts_and_mlps_hold_their_matrices(family: str, pristine, build) -> None:
    folder = pristine(family)
    model = build(folder)
    layers, stem = model.language_model.model.layers, "model.language_model.layers"
    experts = layers[2].mlp.experts.routed_experts.exl3
    for expert in (0, 5):
        parts = [
            dense_of(folder, f"{stem}.2.mlp.experts.{expert}.{part}_proj")
            for part in ("gate", "up", "down")
        ]
        same(experts.w13.weight[expert].float(), torch.cat(parts[:2]))
        same(experts.w2.weight[expert].float(), parts[2])
    for parameter in model.parameters():
        assert not torch.isnan(parameter).any()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tr3", "full"])
def test_mtp_block_loads(family: str, pristine, build) -> None:
    folder = pristine(family)
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    model = build(folder, draft=True, speculative_config=speculation)
    layer = model.model.layers["4"]
    want = dense_of(folder, "model.language_model.layers.4.eh_proj")
    eh_proj = layer.eh_proj
    got = weight_of(eh_proj) if hasattr(eh_proj, "exl3") else eh_proj.weight.float()
    same(got, want)
    assert hasattr(eh_proj, "exl3") == (family == "full")
    assert layer.mtp_block.mlp.experts.routed_experts.exl3.w2.weight.shape[0] == 8


@pytest.mark.slow
def test_packed_drafter_loads(pristine, drafter, build) -> None:
    folder = drafter(packed=True)
    speculation = {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}
    model = build(pristine("full"), draft=True, speculative_config=speculation)
    attention = model.model.layers[1].self_attn
    parts = [dense_of(folder, f"layers.1.self_attn.{n}_proj") for n in "qkv"]
    same(weight_of(attention.qkv_proj), torch.cat(parts))
    same(weight_of(model.model.fc), dense_of(folder, "fc"))
    packed = [n for n, m in model.named_modules() if hasattr(m, "exl3")]
    assert sum(len(m.rpartition(".")[0]) > 0 for m in packed) == len(packed)
    assert len(packed) >= 2 * 4


@pytest.mark.slow
def test_the_vision_tower_loads_beside_packed_text(pristine, build) -> None:
    folder = pristine("full")
    model = build(folder, language_model_only=False)
    mlp = model.visual.blocks[0].mlp
    stem = "model.visual.blocks.0.mlp"
    parts = [dense_of(folder, f"{stem}.{part}_proj") for part in ("gate", "up")]
    same(mlp.gate_up_proj.weight.float(), torch.cat(parts))
    for parameter in model.visual.parameters():
        assert not torch.isnan(parameter).any()


def test_loading_leaves_the_environment_as_it_was(pristine, build) -> None:
    before = dict(os.environ)
    build(pristine("tr3"))
    assert dict(os.environ) == before
