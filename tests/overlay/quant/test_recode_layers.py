"""vLLM's layers with 8-bit rows: cut like the whole, edited first, none of it when off."""

from __future__ import annotations

import pytest
import torch

from glm_exl3.quant import edits
from glm_exl3.ref import recode

STEM = "model.layers.0"


@pytest.fixture(autouse=True)
def no_edits():
    edits.clear()
    yield
    edits.clear()


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(2)

    def matrix(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, generator=random).bfloat16()

    return {
        f"{STEM}.self_attn.A_log": torch.zeros(2),
        f"{STEM}.self_attn.o_proj.weight": matrix(96, 256),
        f"{STEM}.mlp.gate_proj.weight": matrix(128, 64),
        f"{STEM}.mlp.up_proj.weight": matrix(128, 64),
        f"{STEM}.mlp.gate.weight": matrix(8, 64),
        "lm_head.weight": matrix(200, 64),
    }


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_EXL3_DENSE_RECODE", "fp8")
    monkeypatch.setenv("GLM_EXL3_DENSE_GROUPS", "dense,kda,head")


def row_layer(config, name: str = f"language_model.{STEM}.self_attn.o_proj"):
    from vllm.model_executor.layers.linear import RowParallelLinear

    return RowParallelLinear(
        256, 96, bias=False, quant_config=config, prefix=name,
        params_dtype=torch.bfloat16, reduce_results=False,
    )  # fmt: skip


def finish(layer: torch.nn.Module) -> torch.nn.Module:
    layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_hold_parts_of_the_codes_of_the_whole(
    ranks: int, asked, tensors, exl3_config, at_rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glm_exl3.quant import recode as layers

    whole = tensors[f"{STEM}.self_attn.o_proj.weight"]
    codes, scale = recode.quantize_rows(whole, "fp8")
    asked_for: list[bool] = []

    def everybody(amax: torch.Tensor, is_sharded: bool) -> torch.Tensor:
        asked_for.append(is_sharded)
        return recode.row_maxima(whole) if is_sharded else amax

    monkeypatch.setattr(layers, "amax_for_tp_weight_quant", everybody)
    config, parts = exl3_config(tensors), []
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    total = torch.zeros(5, 96)
    for rank in range(ranks):
        at_rank(rank, ranks)
        layer = row_layer(config)
        layer.weight.weight_loader(layer.weight, whole)
        finish(layer)
        assert "weight" not in layer._parameters
        assert torch.equal(layer.exl3_recoded.scale, scale)
        parts.append(layer.exl3_recoded.codes.float())
        total += layer(x.chunk(ranks, -1)[rank])[0].float()
    assert torch.equal(torch.cat(parts, 1), codes.float())
    assert asked_for == [ranks > 1] * ranks
    want = recode.linear(x, codes, scale).float()
    assert (total - want).norm() / want.norm() < 1e-2


def test_a_merged_layer_and_the_head_are_recoded(asked, tensors, exl3_config, at_rank) -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    at_rank(1, 2)
    config = exl3_config(tensors)
    merged = MergedColumnParallelLinear(
        64, [128] * 2, bias=False, quant_config=config,
        prefix=f"{STEM}.mlp.gate_up_proj", params_dtype=torch.bfloat16,
    )  # fmt: skip
    for key, part in enumerate(("gate", "up")):
        merged.weight.weight_loader(merged.weight, tensors[f"{STEM}.mlp.{part}_proj.weight"], key)
    finish(merged)
    halves = [tensors[f"{STEM}.mlp.{part}_proj.weight"][64:] for part in ("gate", "up")]
    codes, _ = recode.quantize_rows(torch.cat(halves), "fp8")
    assert torch.equal(merged.exl3_recoded.codes.float(), codes.float())
    head = ParallelLMHead(
        200, 64, quant_config=config, prefix="language_model.lm_head", params_dtype=torch.bfloat16
    )
    head.weight.weight_loader(head.weight, tensors["lm_head.weight"])
    start = head.shard_indices.org_vocab_start_index
    finish(head)
    x = torch.randn(3, 64).bfloat16()
    logits = head.quant_method.apply(head, x)
    want = recode.linear(x, *recode.quantize_rows(tensors["lm_head.weight"][start:], "fp8"))
    own = head.shard_indices.num_org_elements
    torch.testing.assert_close(logits[:, :own], want, rtol=2e-2, atol=2e-2)


def test_what_has_no_group_and_everything_when_off_stays(
    tensors, exl3_config, at_rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    at_rank(0, 1)
    off = exl3_config(tensors)
    assert isinstance(row_layer(off).quant_method, UnquantizedLinearMethod)
    assert off.freed_bytes(1) == 0
    monkeypatch.setenv("GLM_EXL3_DENSE_RECODE", "int8")
    monkeypatch.setenv("GLM_EXL3_DENSE_GROUPS", "head")
    only_head = exl3_config(tensors)
    assert isinstance(row_layer(only_head).quant_method, UnquantizedLinearMethod)


def test_the_recode_sees_edited_weights(asked, tensors, exl3_config, at_rank) -> None:
    from glm_exl3.quant.edits_apply import apply_edits

    class Double:
        name, digest, roles = "double", "1", frozenset({"target"})

        def wants(self, module: str) -> bool:
            return module == f"{STEM}.self_attn.o_proj"

        def edit(self, module, full_shape, shard, placement):
            return shard * 2

    at_rank(0, 1)
    whole = tensors[f"{STEM}.self_attn.o_proj.weight"]
    layer = row_layer(exl3_config(tensors))
    layer.weight.weight_loader(layer.weight, whole)
    edits.register(Double())
    model = torch.nn.Module()
    model.add_module("o_proj", layer)
    apply_edits(model, "target")
    finish(layer)
    codes, scale = recode.quantize_rows(whole * 2, "fp8")
    assert torch.equal(layer.exl3_recoded.codes.float(), codes.float())
    assert torch.equal(layer.exl3_recoded.scale, scale)
