"""Cuts as a property: whatever the sizes, the ranks' parts are the whole matrix."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3.format.errors import FormatError
from glm_exl3.format.layout import Codebook, MatrixLayout
from glm_exl3.quant.names import Source
from glm_exl3.quant.params import LinearCollector
from glm_exl3.quant.shards import Geometry, make_shard
from glm_exl3.ref.decode import dequantize

BLOCK = 128
MODULE = "m.proj"


class FakeFacts:
    """Headers of one packed module."""

    def __init__(self, layout: MatrixLayout) -> None:
        self.modules = {MODULE: layout}

    def file_of(self, tensor: str) -> str:
        return "one.safetensors"

    def error(self, tensor: str, **parts: str) -> FormatError:
        return FormatError(file=self.file_of(tensor), tensor=tensor, **parts)


def tensors(layout: MatrixLayout, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    trellis = torch.randint(
        -(2**15), 2**15, layout.trellis_shape, generator=random, dtype=torch.int16
    )
    suh = torch.randn(layout.in_features, generator=random).half()
    svh = torch.randn(layout.out_features, generator=random).half()
    return {"trellis": trellis, "suh": suh, "svh": svh}


def part(facts: FakeFacts, geometry: Geometry, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """This rank's matrix [k, n], decoded."""
    shard = make_shard(facts, geometry, Source(MODULE))
    collector = LinearCollector([shard], facts, torch.device("cpu"), torch.float32)
    for leaf, value in stored.items():
        collector.take(leaf, value, None)
    (matrix,) = collector.finish()
    return dequantize(matrix.trellis, matrix.suh, matrix.svh, matrix.codebook)


blocks = st.integers(1, 4)


@given(blocks, blocks, st.integers(1, 4), st.sampled_from([0, 1]), st.sampled_from([16, 40, 64]))
def test_parts_of_all_ranks_are_the_whole(
    k_blocks: int, n_blocks: int, ranks: int, side: int, last_dim: int
) -> None:
    layout = MatrixLayout(k_blocks * BLOCK, n_blocks * BLOCK, last_dim, Codebook.MUL1)
    facts, stored = FakeFacts(layout), tensors(layout, 1)
    sizes = (layout.in_features, layout.out_features)

    def geometry(rank: int) -> Geometry:
        return Geometry(None, *sizes, cut=side, ranks=(rank, ranks), free_width=True)

    if ranks > sizes[side] // BLOCK:
        with pytest.raises(FormatError, match=r"one\.safetensors: m\.proj\.trellis: TP cannot cut"):
            part(facts, geometry(0), stored)
        return
    parts = [part(facts, geometry(rank), stored) for rank in range(ranks)]
    whole = dequantize(stored["trellis"], stored["suh"], stored["svh"], layout.codebook)
    torch.testing.assert_close(torch.cat(parts, side), whole, rtol=1e-4, atol=1e-4)


@given(st.integers(1, 6), st.integers(2, 4))
def test_equal_shares_are_exact_or_refused(n_blocks: int, ranks: int) -> None:
    layout = MatrixLayout(BLOCK, n_blocks * BLOCK, 32, Codebook.MCG)
    facts = FakeFacts(layout)
    geometry = Geometry(None, BLOCK, n_blocks * BLOCK, cut=1, ranks=(1, ranks))
    if n_blocks % ranks:
        with pytest.raises(FormatError, match=r"m\.proj\.trellis"):
            make_shard(facts, geometry, Source(MODULE))
    else:
        shard = make_shard(facts, geometry, Source(MODULE))
        assert shard.local_out == n_blocks * BLOCK // ranks


@pytest.mark.parametrize(("in_features", "out_features"), [(100, 256), (128, 200), (256, 256)])
def test_padding_is_only_accepted_where_nothing_is_cut(in_features: int, out_features: int) -> None:
    facts = FakeFacts(MatrixLayout(128, 256, 32, Codebook.MCG))
    whole = Geometry(None, in_features, out_features)
    if in_features <= 128:
        shard = make_shard(facts, whole, Source(MODULE))
        assert (shard.in_cut.padded, shard.local_out) == (128, out_features)
    cut = Geometry(None, in_features, out_features, cut=1, ranks=(0, 2))
    if (in_features, out_features) != (100, 256):
        with pytest.raises(FormatError, match="the model needs"):
            make_shard(facts, cut, Source(MODULE))


def test_geometry_of_replicated_shards_is_their_own_size() -> None:
    from glm_exl3.quant.shards import layer_geometry

    layer = SimpleNamespace(tp_rank=1, tp_size=2, output_sizes=[512, 256], replicated_shard_ids={1})
    first, second = layer_geometry(layer, 128, 768, free_width=False)
    assert (first.out_features, first.cut, first.ranks) == (512, 1, (1, 2))
    assert (second.out_features, second.cut) == (128, None)
