"""Splitting fused tensors, naming the tensor at which loading stopped, unwritten parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from glm_exl3.format.errors import FormatError
from glm_exl3.quant.completeness import Naming
from glm_exl3.quant.loading import load_checked, split_fused

STEM = "model.layers.0.self_attn"


def test_a_fused_trellis_splits_by_columns(packed) -> None:
    from glm_exl3.ops.matrix import PackedMatrix
    from glm_exl3.ref.decode import dequantize

    whole = packed(128, 384)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in whole.named(f"{STEM}.qkv_proj").items():
        for piece, value in split_fused(name, tensor):
            module, _, leaf = piece.rpartition(".")
            parts.setdefault(module, {})[leaf] = value
    assert list(parts) == [f"{STEM}.{n}_proj" for n in "qkv"]
    columns = []
    for part in parts.values():
        m = PackedMatrix(part["trellis"], part["suh"], part["svh"], whole.matrix.codebook)
        columns.append(dequantize(m.trellis, m.suh, m.svh, m.codebook))
        assert part["mcg"] == whole.tensors["mcg"]
    torch.testing.assert_close(torch.cat(columns, 1), whole.dense(), rtol=1e-5, atol=1e-7)


def test_fused_convolutions_split_by_channels() -> None:
    value = torch.arange(24.0).view(6, 1, 4)
    parts = dict(split_fused(f"{STEM}.conv1d.weight", value))
    assert list(parts) == [f"{STEM}.{n}_conv1d.weight" for n in "qkv"]
    assert torch.equal(torch.cat(list(parts.values())), value)


@pytest.mark.parametrize("name", [f"{STEM}.q_proj.weight", "model.conv1d.weight", "a.qkv_proj.suh"])
def test_other_tensors_pass(name: str) -> None:
    value = torch.ones(3)
    assert list(split_fused(name, value)) == [(name, value)]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)


NAMING = Naming(lambda name: name)


@pytest.fixture
def facts(folder):
    from glm_exl3.quant.facts import read_facts

    return read_facts(folder({"norm.weight": torch.ones(4), "norm.bias": torch.zeros(4)}))


def stream() -> list[tuple[str, torch.Tensor]]:
    return [("norm.weight", torch.ones(4)), ("norm.bias", torch.zeros(4))]


def test_a_loader_that_stops_is_named_by_its_tensor(facts) -> None:
    def load(weights) -> None:
        for name, _ in weights:
            if name == "norm.bias":
                raise KeyError("no such parameter")

    with pytest.raises(FormatError, match=r"norm\.bias: loading stopped .*no such parameter"):
        load_checked(Model(), stream(), load, facts=facts, naming=NAMING)


def test_a_loader_that_skips_in_silence_is_caught(facts) -> None:
    model = Model()

    def load(weights) -> None:
        for name, value in weights:
            if name == "norm.weight":
                model.norm.weight.data.copy_(value)

    with pytest.raises(FormatError, match=r"parameter norm\.bias holds 4 NaN"):
        load_checked(model, stream(), load, facts=facts, naming=NAMING)


def test_a_complete_load_returns_what_the_loader_returns(facts) -> None:
    model = Model()

    def load(weights) -> set[str]:
        for name, value in weights:
            model.get_parameter(name).data.copy_(value)
        return {"norm.weight"}

    assert load_checked(model, stream(), load, facts=facts, naming=NAMING) == {"norm.weight"}


def test_an_inner_model_and_other_checkpoints_pass_through(facts) -> None:
    seen: list[object] = []
    inner = SimpleNamespace()

    def load(weights) -> str:
        seen.append(weights)
        return "loaded"

    weights: list[tuple[str, torch.Tensor]] = []
    assert load_checked(inner, weights, load, facts=None, naming=NAMING) == "loaded"
    assert seen == [weights]
