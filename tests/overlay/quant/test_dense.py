"""Which layers take the kernel of bf16 rows, and that their weights stay where they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from glm_exl3.fused import install
from glm_exl3.ops import dense_rows, fused_names

BF16 = torch.bfloat16


def switch(monkeypatch: pytest.MonkeyPatch, *, on: bool) -> None:
    monkeypatch.setattr(fused_names, "wanted", lambda: ("dense",) if on else ())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, on=True)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Weights that were multiplied by the operation."""
    seen: list[torch.Tensor] = []

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(weight)
        return F.linear(x, weight)

    monkeypatch.setattr(dense_rows, "linear", linear)
    return seen


def as_on_cuda(layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    monkeypatch.setattr(layer.quant_method, "_gemm_impl", default_unquantized_gemm)


def replicated(config, *, bias: bool = False) -> torch.nn.Module:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    return ReplicatedLinear(
        128, 8, bias=bias, quant_config=config, prefix="a.wk", params_dtype=BF16,
        skip_bias_add=False,
    )  # fmt: skip


def tensors(packed) -> dict[str, torch.Tensor]:
    return packed(128, 128).named("a.wq_b") | {"a.wk.weight": torch.ones(8, 128)}


def test_off_means_vllms_own(packed, exl3_config, at_rank) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from glm_exl3.quant.linear import Exl3LinearMethod

    at_rank(0, 1)
    config = exl3_config(tensors(packed))
    assert type(replicated(config).quant_method) is UnquantizedLinearMethod
    assert type(half_packed(exl3_config, packed(128, 256)).quant_method) is Exl3LinearMethod


def test_a_dense_layer_multiplies_its_own_weight(
    asked, products, packed, exl3_config, at_rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from glm_exl3.quant.dense import DenseLinearMethod

    at_rank(0, 1)
    layer = replicated(exl3_config(tensors(packed)))
    method = layer.quant_method
    assert type(method) is DenseLinearMethod
    assert isinstance(method, UnquantizedLinearMethod)  # vLLM asks so where it reads `weight`
    whole = torch.randn(8, 128).to(BF16)
    layer.weight.weight_loader(layer.weight, whole)
    x = torch.randn(3, 128).to(BF16)
    as_on_cuda(layer, monkeypatch)
    assert torch.equal(layer(x)[0], F.linear(x, whole))
    assert products == [layer.weight]
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    layer(x)
    assert len(products) == 1


def test_a_bias_and_a_back_end_of_ones_choice_stay_with_vllm(
    asked, products, packed, exl3_config, at_rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_rank(0, 1)
    config = exl3_config(tensors(packed))
    x = torch.randn(3, 128).to(BF16)
    layer = replicated(config, bias=True)
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.ones_(layer.bias)
    as_on_cuda(layer, monkeypatch)
    assert torch.equal(layer(x)[0], F.linear(x, layer.weight, layer.bias))
    other = replicated(config)
    monkeypatch.setattr(other.quant_method, "_gemm_impl", lambda *_: "another")
    assert other(x)[0] == "another"
    assert not products


@pytest.mark.parametrize("switched_on", [False, True])
def test_merged_layers_load_by_the_same_loader(
    switched_on: bool, packed, exl3_config, at_rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM chooses between two loaders by the name of the method's class."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    switch(monkeypatch, on=switched_on)
    at_rank(1, 2)
    layer = MergedColumnParallelLinear(
        128, [8, 16], bias=False, quant_config=exl3_config(tensors(packed)),
        prefix="a.gate_up_proj", params_dtype=BF16,
    )  # fmt: skip
    assert layer.weight.weight_loader.__name__ == "weight_loader_v2"
    wholes = [torch.randn(8, 128).to(BF16), torch.randn(16, 128).to(BF16)]
    for key, whole in enumerate(wholes):
        layer.weight.weight_loader(layer.weight, whole, key)
    assert torch.equal(layer.weight, torch.cat([whole.chunk(2)[1] for whole in wholes]))


def half_packed(exl3_config, gate) -> torch.nn.Module:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    stored = gate.named("m.gate_proj") | {"m.up_proj.weight": torch.ones(256, 128, dtype=BF16)}
    return MergedColumnParallelLinear(
        128, [256] * 2, bias=False, quant_config=exl3_config(stored),
        prefix="m.gate_up_proj", params_dtype=BF16,
    )  # fmt: skip


def test_a_layer_that_is_half_packed_loads_as_before(
    asked, packed, exl3_config, at_rank, load
) -> None:
    at_rank(0, 1)
    gate, dense = packed(128, 256), torch.randn(256, 128).to(BF16)
    layer = half_packed(exl3_config, gate)
    load(layer, gate.tensors, 0)
    layer.weight.weight_loader(layer.weight, dense, 1)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.exl3.own_rows
    x = torch.randn(3, 128).to(BF16)
    want = torch.cat([x.float() @ gate.dense(), F.linear(x, dense).float()], -1)
    torch.testing.assert_close(layer(x)[0].float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("together", [False, True])
def test_dense_rows_beside_packed_ones(together: bool, products, packed) -> None:
    """Unless one launch takes both, the dense ones go their own way, uncopied."""
    from glm_exl3.quant.linear import LoadedLinear, Term

    dense = torch.randn(8, 128).to(BF16)
    terms = (Term(packed(128, 256).matrix, 256, 128), Term(dense, 8, 128))
    x = torch.randn(3, 128).to(BF16)
    loaded = LoadedLinear(terms, "reference", together, own_rows=True)
    assert torch.equal(loaded.apply(x, None), LoadedLinear(terms, "reference").apply(x, None))
    assert [weight.data_ptr() for weight in products] == [dense.data_ptr()] * (not together)
    padded = LoadedLinear((Term(dense, 6, 128),), "reference", own_rows=True)
    want = F.linear(x[:, :96], dense[:6, :96])
    torch.testing.assert_close(padded.apply(x[:, :96], None), want)
    assert len(products) <= 1


@pytest.mark.parametrize("own_rows", [False, True])
def test_an_input_that_is_too_wide_is_refused(own_rows: bool, packed) -> None:
    from glm_exl3.quant.linear import LoadedLinear, Term

    for matrix in (packed(128, 256).matrix, torch.randn(256, 128).to(BF16)):
        loaded = LoadedLinear((Term(matrix, 256, 128),), "reference", own_rows=own_rows)
        with pytest.raises(RuntimeError):
            loaded.apply(torch.randn(3, 160).to(BF16), None)


def test_recoding_comes_first(
    asked, packed, exl3_config, at_rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    from glm_exl3.quant.recode import RecodedLinearMethod

    monkeypatch.setenv("GLM_EXL3_DENSE_RECODE", "fp8")
    monkeypatch.setenv("GLM_EXL3_DENSE_GROUPS", "kda")
    at_rank(0, 1)
    stem = "model.layers.0.self_attn"
    config = exl3_config(
        {f"{stem}.A_log": torch.zeros(2), f"{stem}.o_proj.weight": torch.ones(96, 256).to(BF16)}
    )
    layer = RowParallelLinear(
        256, 96, bias=False, quant_config=config, prefix=f"{stem}.o_proj", params_dtype=BF16
    )
    assert type(layer.quant_method) is RecodedLinearMethod


def test_another_platform_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm_exl3.ops import dense_rows

    monkeypatch.setenv("GLM_EXL3_FUSED_OPS", "dense")
    assert not dense_rows.in_use()


def test_layers_without_a_configuration_are_adopted(
    at_rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    from glm_exl3.quant.dense import DenseLinearMethod

    at_rank(0, 1)
    taps = ColumnParallelLinear(4, 64, bias=False, params_dtype=torch.float32, prefix="conv")
    taps.weight.data = taps.weight.data.unsqueeze(1)
    indexer = replicated(None)
    model = torch.nn.ModuleDict({"conv": taps, "wk": indexer, "act": torch.nn.SiLU()})
    weight = indexer.weight
    install.join(model)
    assert type(indexer.quant_method) is not DenseLinearMethod
    monkeypatch.setattr(install, "_installed", {"dense"})
    install.join(model)
    assert type(indexer.quant_method) is DenseLinearMethod
    assert indexer.weight is weight
    assert type(taps.quant_method) is not DenseLinearMethod
