"""Edits see each rank's part of every matrix, dense or packed, and cannot be overlooked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.layout import Codebook
from glm_exl3.quant import edits
from glm_exl3.quant.edits import Placement
from glm_exl3.quant.edits_apply import apply_edits, sites
from glm_exl3.ref.decode import dequantize
from glm_exl3.ref.reencode import reencode


@dataclass
class Change:
    """An edit that applies `how` to the modules it names and keeps what it saw."""

    modules: tuple[str, ...]
    how: Callable[[torch.Tensor, Placement], torch.Tensor | None]
    name: str = "change"
    digest: str = "0"
    roles: frozenset[str] = frozenset({"target"})
    seen: list[tuple[str, tuple[int, int], Placement]] = field(default_factory=list)

    def wants(self, module: str) -> bool:
        return module in self.modules

    def edit(
        self, module: str, full_shape: tuple[int, int], shard: torch.Tensor, placement: Placement
    ) -> torch.Tensor | None:
        self.seen.append((module, full_shape, placement))
        return self.how(shard, placement)


@pytest.fixture(autouse=True)
def no_edits() -> Iterator[None]:
    edits.clear()
    yield
    edits.clear()


def holder(**layers: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def dense_row(at_rank, rank: int, ranks: int, whole: torch.Tensor, name: str):
    from vllm.model_executor.layers.linear import RowParallelLinear

    at_rank(rank, ranks)
    n, k = whole.shape
    layer = RowParallelLinear(k, n, bias=False, prefix=name, params_dtype=whole.dtype)
    layer.weight.weight_loader(layer.weight, whole)
    return layer


def scale_rows(shard: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Multiply by the number of the row and of the column in the whole matrix."""
    rows = torch.arange(placement.out.start, placement.out.stop)
    columns = torch.arange(placement.inputs.start, placement.inputs.stop)
    return shard * (1 + rows)[:, None].to(shard) * (1 + columns).to(shard)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_a_dense_row_parallel_matrix_make_the_edited_whole(ranks: int, at_rank) -> None:
    whole = torch.randn(96, 256)
    name = "language_model.model.layers.3.self_attn.o_proj"
    parts = []
    for rank in range(ranks):
        edits.clear()
        edit = Change(("model.layers.3.self_attn.o_proj",), scale_rows)
        edits.register(edit)
        layer = dense_row(at_rank, rank, ranks, whole, name)
        assert apply_edits(holder(o_proj=layer), "target") == {"change": list(edit.modules)}
        (_, shape, placement) = edit.seen[0]
        assert shape == (96, 256)
        assert placement.whole_columns(shape)
        assert placement.whole_rows(shape) == (ranks == 1)
        parts.append(layer.weight.data)
    full = Placement(edits.Cut(0, 96, 96), edits.Cut(0, 256, 256))
    assert torch.equal(torch.cat(parts, 1), scale_rows(whole, full))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_a_merged_layer_have_their_own_names_and_rows(ranks: int, at_rank) -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    gate, up = torch.randn(512, 64), torch.randn(512, 64)
    name = "model.layers.0.mlp.gate_up_proj"
    collected = []
    for rank in range(ranks):
        edits.clear()
        edits.register(Change(("model.layers.0.mlp.up_proj",), scale_rows))
        at_rank(rank, ranks)
        layer = MergedColumnParallelLinear(
            64, [512] * 2, bias=False, prefix=name, params_dtype=gate.dtype
        )
        for key, value in enumerate((gate, up)):
            layer.weight.weight_loader(layer.weight, value, key)
        apply_edits(holder(a=layer), "target")
        collected.append(layer.weight.data.chunk(2))
    full = Placement(edits.Cut(0, 512, 512), edits.Cut(0, 64, 64))
    assert torch.equal(torch.cat([part[0] for part in collected]), gate)
    assert torch.equal(torch.cat([part[1] for part in collected]), scale_rows(up, full))


@pytest.mark.parametrize("side", ["row", "column"])
def test_a_packed_matrix_is_decoded_edited_and_encoded(
    side: str, packed, exl3_config, at_rank, load
) -> None:
    """Ranks encode what the whole matrix would have there, and the product follows the edit."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    kind = {"row": RowParallelLinear, "column": ColumnParallelLinear}[side]
    ranks, (k, n) = 2, {"row": (256, 128), "column": (128, 256)}[side]
    whole = packed(k, n, 4, Codebook.MUL1)
    config = exl3_config(whole.named("model.layers.1.self_attn.o_proj"))
    name, parts = "model.layers.1.self_attn.o_proj", []
    for rank in range(ranks):
        edits.clear()
        edits.register(Change((name,), lambda shard, _: shard * 0.9))
        at_rank(rank, ranks)
        layer = kind(k, n, bias=False, quant_config=config, prefix=name, params_dtype=torch.float32)
        load(layer, whole.tensors)
        apply_edits(holder(o_proj=layer), "target")
        layer.quant_method.process_weights_after_loading(layer)
        parts.append(layer.exl3.terms[0].matrix)
    got = torch.cat(parts, 1 if side == "row" else 0)
    m = whole.matrix
    trellis = reencode(0.9 * whole.dense(), m.suh, m.svh, 4, m.codebook)
    want = dequantize(trellis, m.suh, m.svh, m.codebook)
    torch.testing.assert_close(got, want.t(), rtol=1e-5, atol=1e-6)
    error = (got.t() - 0.9 * whole.dense()).norm() / (0.9 * whole.dense()).norm()
    assert error < 0.08


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_dense_head_is_offered_without_its_padding(ranks: int, at_rank) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    whole, parts = torch.randn(200, 32), []
    for rank in range(ranks):
        edits.clear()
        edit = Change(("lm_head",), scale_rows)
        edits.register(edit)
        at_rank(rank, ranks)
        head = ParallelLMHead(200, 32, prefix="language_model.lm_head", params_dtype=whole.dtype)
        head.weight.weight_loader(head.weight, whole)
        apply_edits(holder(lm_head=head), "target")
        assert edit.seen[0][1] == (200, 32)
        width = edit.seen[0][2].out.width
        parts.append(head.weight.data[:width])
    full = Placement(edits.Cut(0, 200, 200), edits.Cut(0, 32, 32))
    assert torch.equal(torch.cat(parts), scale_rows(whole, full))


def test_a_packed_head_is_offered(packed, exl3_config, at_rank, load) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    whole = packed(128, 128, 4)
    at_rank(0, 1)
    head = ParallelLMHead(
        128,
        128,
        quant_config=exl3_config(whole.named("lm_head")),
        prefix="lm_head",
        params_dtype=torch.float32,
    )
    load(head, whole.tensors)
    edit = Change(("lm_head",), lambda shard, placement: shard * 0.5)
    edits.register(edit)
    apply_edits(holder(lm_head=head), "target")
    assert edit.seen[0][2].packing == edits.Packing(4, Codebook.MCG)
    head.quant_method.process_weights_after_loading(head)
    got, want = head.exl3.terms[0].matrix.t(), 0.5 * whole.dense()
    assert (got - want).norm() < 0.12 * want.norm()


def test_a_drafters_matrices_have_their_own_prefix_and_foreign_ones_are_left_out(at_rank) -> None:
    import re

    whole = torch.randn(8, 16)
    layer = dense_row(at_rank, 0, 1, whole, "model.layers.45.self_attn.o_proj")
    model = holder(o_proj=layer, eh_proj=torch.nn.Linear(4, 4, bias=False))
    assert [site.module for site in sites(model, "draft")] == [
        "draft.layers.45.self_attn.o_proj",
        "draft.eh_proj",
    ]
    names = [site.module for site in sites(model, "mtp", (re.compile(r"^eh_proj\."),))]
    assert names == ["model.layers.45.self_attn.o_proj"]


def test_an_edit_that_matches_nothing_is_named(at_rank) -> None:
    layer = dense_row(at_rank, 0, 1, torch.randn(8, 16), "model.layers.0.self_attn.o_proj")
    for how, wanted in ((scale_rows, ("other",)), (lambda *_: None, ("o_proj",))):
        edits.clear()
        edits.register(Change(wanted, how, name="ablit"))
        with pytest.raises(GlmExl3Error, match="edit ablit changed no matrix of the target"):
            apply_edits(holder(o_proj=layer), "target")
    assert apply_edits(holder(o_proj=layer), "mtp") == {}


@pytest.mark.parametrize(
    "how", [lambda shard, _: shard[:-1], lambda shard, _: shard / 0], ids=["shape", "infinite"]
)
def test_an_answer_that_cannot_be_served_is_refused(how, at_rank) -> None:
    layer = dense_row(at_rank, 0, 1, torch.randn(8, 16), "o_proj")
    before = layer.weight.data.clone()
    edits.register(Change(("o_proj",), how))
    with pytest.raises(GlmExl3Error, match="edit change made of o_proj"):
        apply_edits(holder(o_proj=layer), "target")
    assert torch.equal(layer.weight.data, before)


def test_a_packed_matrix_at_half_a_rate_is_refused(packed, exl3_config, at_rank, load) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    whole = packed(128, 128, 2.5, Codebook.MUL1)
    at_rank(0, 1)
    layer = RowParallelLinear(
        128, 128, bias=False, quant_config=exl3_config(whole.named("a.o_proj")), prefix="a.o_proj"
    )
    load(layer, whole.tensors)
    edits.register(Change(("a.o_proj",), scale_rows))
    with pytest.raises(GlmExl3Error, match=r"cannot change a\.o_proj: K=2\.5"):
        apply_edits(holder(o_proj=layer), "target")


def test_names_and_roles_are_checked_and_the_digest_names_every_edit() -> None:
    assert edits.digest_entry() == "-"
    edits.register(Change((), scale_rows, name="a", digest="1"))
    edits.register(Change((), scale_rows, name="b", digest="2"))
    assert edits.digest_entry() == "a:1,b:2"
    with pytest.raises(GlmExl3Error, match="edit a is registered already"):
        edits.register(Change((), scale_rows, name="a"))
    with pytest.raises(GlmExl3Error, match="edit c is for vision"):
        edits.register(Change((), scale_rows, name="c", roles=frozenset({"vision"})))


@settings(max_examples=3, deadline=None)
@given(bits=st.integers(2, 4), codebook=st.sampled_from(list(Codebook)), seed=st.integers(0, 2**20))
def test_an_unchanged_matrix_encodes_to_its_own_values(
    bits: int, codebook: Codebook, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    trellis = torch.randint(-(2**15), 2**15, (8, 2, 16 * bits), generator=random).to(torch.int16)
    trellis = torch.cat([trellis] * 4, 1)
    suh = torch.rand(128, generator=random).add(0.5).half()
    svh = torch.rand(128, generator=random).sub(0.5).half()
    before = dequantize(trellis, suh, svh, codebook)
    again = reencode(before, suh, svh, bits, codebook)
    error = (dequantize(again, suh, svh, codebook) - before).norm() / before.norm()
    assert error < 1e-2


def test_channels_without_a_scale_encode_to_something_finite() -> None:
    def zeros(tiles: torch.Tensor, bits: int, codebook: Codebook) -> torch.Tensor:
        assert torch.isfinite(tiles).all()
        return torch.zeros(tiles.shape, dtype=torch.int32)

    scales = torch.zeros(128, dtype=torch.float16)
    trellis = reencode(torch.randn(128, 128), scales, scales, 2, Codebook.MCG, zeros)
    assert not dequantize(trellis, scales, scales, Codebook.MCG).any()
