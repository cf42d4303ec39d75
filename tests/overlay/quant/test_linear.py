"""Every kind of linear layer at TP 1, 2 and 4 gives the product of the whole packed matrix."""

from __future__ import annotations

import pytest
import torch

from glm_exl3.format.errors import FormatError
from glm_exl3.format.layout import Codebook
from glm_exl3.ref.linear import exl3_linear

RANKS = (1, 2, 4)


def product(x: torch.Tensor, matrix) -> torch.Tensor:
    m = matrix.matrix
    return exl3_linear(x, m.trellis, m.suh, m.svh, m.codebook)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-4)


def inputs(features: int) -> torch.Tensor:
    return torch.randn(3, features, generator=torch.Generator().manual_seed(5))


def finish(layer: torch.nn.Module) -> torch.nn.Module:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("ranks", RANKS)
def test_column_parallel(ranks: int, packed, exl3_config, at_rank, load) -> None:
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    whole = packed(256, 512, 3, Codebook.MUL1)
    config = exl3_config(whole.named("a.q_b_proj"))
    x, parts = inputs(256), []
    for rank in range(ranks):
        at_rank(rank, ranks)
        layer = ColumnParallelLinear(
            256, 512, bias=False, quant_config=config, prefix="a.q_b_proj", params_dtype=x.dtype
        )
        load(layer, whole.tensors)
        parts.append(finish(layer)(x)[0])
    close(torch.cat(parts, -1), product(x, whole))


@pytest.mark.parametrize("ranks", RANKS)
def test_row_parallel_sums_to_the_whole(ranks: int, packed, exl3_config, at_rank, load) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    whole = packed(512, 256, 4)
    config = exl3_config(whole.named("a.o_proj"))
    x, total = inputs(512), torch.zeros(3, 256)
    for rank in range(ranks):
        at_rank(rank, ranks)
        layer = RowParallelLinear(
            512,
            256,
            bias=False,
            quant_config=config,
            prefix="a.o_proj",
            params_dtype=x.dtype,
            reduce_results=False,
        )
        load(layer, whole.tensors)
        total += finish(layer)(x.chunk(ranks, -1)[rank])[0]
    close(total, product(x, whole))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("width", [512, 640])
def test_gate_up_and_down_agree_on_uneven_cuts(
    ranks: int, width: int, packed, exl3_config, at_rank, load
) -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

    gate, up = packed(128, width), packed(128, width)
    down = packed(width, 128, 3)
    tensors = gate.named("m.gate_proj") | up.named("m.up_proj") | down.named("m.down_proj")
    config = exl3_config(tensors)
    x, total = inputs(128), torch.zeros(3, 128)
    for rank in range(ranks):
        at_rank(rank, ranks)
        merged = MergedColumnParallelLinear(
            128,
            [width] * 2,
            bias=False,
            quant_config=config,
            prefix="m.gate_up_proj",
            params_dtype=x.dtype,
        )
        load(merged, gate.tensors, 0)
        load(merged, up.tensors, 1)
        row = RowParallelLinear(
            width,
            128,
            bias=False,
            quant_config=config,
            prefix="m.down_proj",
            params_dtype=x.dtype,
            reduce_results=False,
        )
        load(row, down.tensors)
        a, b = finish(merged)(x)[0].chunk(2, -1)
        total += finish(row)(torch.tanh(a) * b)[0]
    close(total, product(torch.tanh(product(x, gate)) * product(x, up), down))


@pytest.mark.parametrize("ranks", RANKS)
def test_qkv_replicates_key_value_heads(ranks: int, packed, exl3_config, at_rank, load) -> None:
    from vllm.model_executor.layers.linear import QKVParallelLinear

    heads, kv_heads = 4, 2
    q, k, v = packed(128, heads * 128, 4), packed(128, kv_heads * 128, 6), packed(128, 256, 6)
    tensors = q.named("a.q_proj") | k.named("a.k_proj") | v.named("a.v_proj")
    config = exl3_config(tensors)
    x = inputs(128)
    want = [product(x, m) for m in (q, k, v)]
    for rank in range(ranks):
        at_rank(rank, ranks)
        layer = QKVParallelLinear(
            128,
            128,
            heads,
            kv_heads,
            bias=False,
            quant_config=config,
            prefix="a.qkv_proj",
            params_dtype=x.dtype,
        )
        for shard, matrix in (("q", q), ("k", k), ("v", v)):
            load(layer, matrix.tensors, shard)
        got = finish(layer)(x)[0]
        kv_rank, kv_ranks = rank // max(1, ranks // kv_heads), min(ranks, kv_heads)
        mine = [
            want[0].chunk(ranks, -1)[rank],
            want[1].chunk(kv_ranks, -1)[kv_rank],
            want[2].chunk(kv_ranks, -1)[kv_rank],
        ]
        close(got, torch.cat(mine, -1))


def test_packed_and_dense_shards_live_in_one_layer(packed, exl3_config, at_rank, load) -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    at_rank(1, 2)
    gate = packed(128, 256)
    dense = torch.randn(256, 128)
    config = exl3_config(gate.named("m.gate_proj") | {"m.up_proj.weight": dense})
    layer = MergedColumnParallelLinear(
        128,
        [256] * 2,
        bias=False,
        quant_config=config,
        prefix="m.gate_up_proj",
        params_dtype=torch.float32,
    )
    load(layer, gate.tensors, 0)
    layer.weight.weight_loader(layer.weight, dense, 1)
    x = inputs(128)
    want = torch.cat([product(x, gate)[:, 128:], (x @ dense.T)[:, 128:]], -1)
    close(finish(layer)(x)[0], want)


def test_a_module_without_trellis_keeps_vllms_method(packed, exl3_config, at_rank) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    at_rank(0, 1)
    config = exl3_config(packed(128, 128).named("a.wq_b") | {"a.wk.weight": torch.ones(8, 128)})
    layer = ReplicatedLinear(128, 8, bias=False, quant_config=config, prefix="a.wk")
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)


def test_a_replicated_layer_is_whole_on_every_rank(packed, exl3_config, at_rank, load) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    at_rank(1, 2)
    whole = packed(128, 256)
    config = exl3_config(whole.named("a.wq_b"))
    layer = ReplicatedLinear(
        128, 256, bias=False, quant_config=config, prefix="a.wq_b", params_dtype=torch.float32
    )
    load(layer, whole.tensors)
    x = inputs(128)
    close(finish(layer)(x)[0], product(x, whole))


def test_zero_padding_of_the_converter_is_trimmed(packed, exl3_config, at_rank, load) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    at_rank(0, 1)
    stored = packed(128, 128)
    config = exl3_config(stored.named("c.kernel_projection"))
    layer = ReplicatedLinear(
        96,
        48,
        bias=False,
        quant_config=config,
        prefix="c.kernel_projection",
        params_dtype=torch.float32,
    )
    load(layer, stored.tensors)
    x = inputs(96)
    want = product(torch.nn.functional.pad(x, (0, 32)), stored)[:, :48]
    close(finish(layer)(x)[0], want)


def test_legacy_sign_words_load(packed, exl3_config, at_rank, load) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    at_rank(0, 1)
    stored = packed(128, 128)
    words = torch.tensor([1 << 3, 0, 5, 0, 0, 0, 0, -1], dtype=torch.int16)
    tensors = {**stored.tensors, "su": words, "sv": words.flip(0)}
    del tensors["suh"], tensors["svh"]
    config = exl3_config({f"a.wq_b.{leaf}": value for leaf, value in tensors.items()})
    layer = ReplicatedLinear(
        128, 128, bias=False, quant_config=config, prefix="a.wq_b", params_dtype=torch.float32
    )
    load(layer, tensors)
    x = inputs(128)
    m = stored.matrix
    close(finish(layer)(x)[0], exl3_linear(x, m.trellis, words, words.flip(0), m.codebook))


def test_equal_input_scales_become_one_matrix(packed, exl3_config, at_rank, load) -> None:
    from glm_exl3.ops import table
    from glm_exl3.quant.linear import finish_linear

    gate, up = packed(128, 256), packed(128, 128)
    same = up.matrix.__class__(up.matrix.trellis, gate.matrix.suh, up.matrix.svh, Codebook.MCG)
    assert gate.matrix.joins(same)
    assert not gate.matrix.joins(up.matrix)
    joined = gate.matrix.join(same)
    x = inputs(128)
    reference = table.row("reference").load()
    want = torch.cat([reference.linear(x, gate.matrix), reference.linear(x, same)], -1)
    close(reference.linear(x, joined), want)
    assert callable(finish_linear)


def test_tp_that_cannot_cut_names_the_tensor(packed, exl3_config, at_rank) -> None:
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    at_rank(0, 4)
    config = exl3_config(packed(128, 768).named("a.q_b_proj"))
    with pytest.raises(FormatError, match=r"a\.q_b_proj\.trellis.*6") as error:
        ColumnParallelLinear(128, 768, bias=False, quant_config=config, prefix="a.q_b_proj")
    assert error.value.code == "tp-cut"


def test_fewer_blocks_than_ranks_names_the_tensor(packed, exl3_config, at_rank) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    at_rank(0, 4)
    config = exl3_config(packed(256, 128).named("m.down_proj"))
    with pytest.raises(FormatError, match=r"m\.down_proj\.trellis") as error:
        RowParallelLinear(256, 128, bias=False, quant_config=config, prefix="m.down_proj")
    assert error.value.code == "tp-cut"


def test_other_sizes_than_the_models_are_refused(packed, exl3_config, at_rank) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    at_rank(0, 1)
    config = exl3_config(packed(256, 128).named("a.wq_b"))
    with pytest.raises(FormatError, match=r"a\.wq_b\.trellis.*256 x 128.*128 x 128"):
        ReplicatedLinear(128, 128, bias=False, quant_config=config, prefix="a.wq_b")


def replicated(config: object) -> torch.nn.Module:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    return ReplicatedLinear(128, 128, bias=False, quant_config=config, prefix="a.wq_b")


def test_a_tensor_that_never_comes_is_named(packed, exl3_config, at_rank, load) -> None:
    at_rank(0, 1)
    stored = packed(128, 128)
    layer = replicated(exl3_config(stored.named("a.wq_b")))
    del stored.tensors["svh"]
    load(layer, stored.tensors)
    with pytest.raises(FormatError, match=r"\.safetensors: a\.wq_b\.svh: .*did not deliver"):
        finish(layer)


def test_a_tensor_that_comes_twice_is_refused(packed, exl3_config, at_rank, load) -> None:
    at_rank(0, 1)
    stored = packed(128, 128)
    layer = replicated(exl3_config(stored.named("a.wq_b")))
    load(layer, stored.tensors)
    with pytest.raises(FormatError, match=r"a\.wq_b\.suh.*twice"):
        load(layer, {"suh": stored.tensors["suh"]})


@pytest.mark.parametrize("leaf", ["suh", "svh"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_scales_are_refused(
    leaf: str, value: float, packed, exl3_config, at_rank, load
) -> None:
    at_rank(0, 1)
    stored = packed(128, 128)
    layer = replicated(exl3_config(stored.named("a.wq_b")))
    stored.tensors[leaf] = stored.tensors[leaf].clone()
    stored.tensors[leaf][77] = value
    with pytest.raises(FormatError, match=rf"a\.wq_b\.{leaf}: 1 of 128 scales are not finite"):
        load(layer, stored.tensors)


def test_a_wrong_marker_is_refused_while_loading(packed, exl3_config, at_rank, load) -> None:
    at_rank(0, 1)
    stored = packed(128, 128)
    layer = replicated(exl3_config(stored.named("a.wq_b")))
    with pytest.raises(FormatError, match=r"a\.wq_b\.mcg"):
        load(layer, {"mcg": torch.tensor(5, dtype=torch.int32)})
