"""Which part of which checkpoint matrix a rank holds, for every kind of vLLM linear layer.

Pure: takes the sizes a layer was built with and returns `Shard`s. All cuts sit on multiples of 128,
the Hadamard block. Ranks may hold different widths where the cut dimension never leaves the rank
(gate/up and down); everywhere else vLLM expects equal shares, and a cut that cannot give them is an
error here instead of a wrong answer later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm_exl3.format.errors import FormatError
from glm_exl3.format.layout import HADAMARD, MatrixLayout
from glm_exl3.format.sharding import Cut, block_cuts
from glm_exl3.quant.facts import Facts
from glm_exl3.quant.names import Source

Key = int | str | None


@dataclass(frozen=True)
class Geometry:
    """One sub-matrix of a layer as the model wants it: full sizes, and who cuts what.

    `ranks` is (rank, number of ranks) on the cut dimension `cut`: 1 = out features, 0 = in
    features, None = whole on every rank. `free_width` allows unequal shares.
    """

    key: Key
    in_features: int
    out_features: int
    cut: int | None = None
    ranks: tuple[int, int] = (0, 1)
    free_width: bool = False


@dataclass(frozen=True)
class Shard:
    """A `Geometry` tied to a checkpoint module, with this rank's cut of it.

    `layout` is None for a dense matrix. `in_cut` and `out_cut` are in features of the full matrix.
    """

    geometry: Geometry
    source: Source
    layout: MatrixLayout | None
    in_cut: Cut
    out_cut: Cut

    @property
    def key(self) -> Key:
        return self.geometry.key

    @property
    def local_out(self) -> int:
        """Out features of this rank's product: zero padding of a cut stays, of a matrix goes."""
        return self.out_cut.padded if self.geometry.cut == 1 else self.geometry.out_features


def _whole(size: int) -> Cut:
    return Cut(0, size, size)


def module_cuts(facts: Facts, module: str, size: int, ranks: int) -> tuple[Cut, ...]:
    """`block_cuts` whose FormatError names file and tensor of the module that cannot be cut."""
    try:
        return block_cuts(size, ranks)
    except FormatError as error:
        raise facts.error(
            f"{module}.trellis", code=error.code, seen=error.seen, why=error.why, fix=error.fix
        ) from error


def _packed_cut(facts: Facts, geometry: Geometry, size: int, module: str) -> Cut:
    rank, ranks = geometry.ranks
    if ranks == 1:
        return _whole(size)
    cuts = module_cuts(facts, module, size, ranks)
    if not geometry.free_width and len({cut.stop - cut.start for cut in cuts}) > 1:
        raise facts.error(
            f"{module}.trellis",
            code="tp-cut",
            seen=f"{size} features on the cut side, {ranks} ranks need equal shares of whole "
            f"{HADAMARD}-blocks",
            why="a packed matrix can only be cut between Hadamard blocks",
            fix=f"choose a tensor-parallel size that divides the blocks ({size // HADAMARD} here)",
        )
    return cuts[rank]


def _dense_cut(facts: Facts, geometry: Geometry, size: int, module: str) -> Cut:
    """Equal shares without block alignment; blocks like packed siblings if widths are free."""
    rank, ranks = geometry.ranks
    if geometry.free_width and ranks > 1:
        return module_cuts(facts, module, size, ranks)[rank]
    width = size // ranks
    return Cut(rank * width, (rank + 1) * width, width)


def make_shard(facts: Facts, geometry: Geometry, source: Source) -> Shard:
    """Tie a geometry to its checkpoint matrix.

    A packed matrix may be larger than the model's only by the converter's zero padding to the next
    multiple of 128, and only on a side that is not cut. Raises FormatError for other sizes and for
    cuts that do not fit the blocks.
    """
    layout = facts.modules.get(source.module)
    sizes = [geometry.in_features, geometry.out_features]
    if layout is not None:
        stored = [layout.in_features, layout.out_features // source.parts]
        for side, (want, have) in enumerate(zip(sizes, stored, strict=True)):
            padded = -(-want // HADAMARD) * HADAMARD
            if have != want and (have != padded or geometry.cut == side):
                raise facts.error(
                    f"{source.module}.trellis",
                    code="shape",
                    seen=f"stores {stored[0]} x {stored[1]} features, the model needs "
                    f"{sizes[0]} x {sizes[1]}",
                    why="configuration and checkpoint do not belong together",
                    fix="use the config.json that was stored with these weights",
                )
        sizes = stored
    cutter = _dense_cut if layout is None else _packed_cut
    cuts = [_whole(size) for size in sizes]
    if geometry.cut is not None:
        cuts[geometry.cut] = cutter(facts, geometry, sizes[geometry.cut], source.module)
    return Shard(geometry, source, layout, cuts[0], cuts[1])


def layer_geometry(
    layer: Any, input_size: int, output_size: int, *, free_width: bool
) -> tuple[Geometry, ...]:
    """The sub-matrices of a vLLM linear layer, from the attributes its constructor set."""
    from vllm.model_executor.layers.linear import (
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )

    if isinstance(layer, ReplicatedLinear):
        return (Geometry(None, input_size, output_size),)
    ranks = (int(layer.tp_rank), int(layer.tp_size))
    if isinstance(layer, RowParallelLinear):
        return (Geometry(None, input_size, output_size, 0, ranks, free_width),)
    if isinstance(layer, QKVParallelLinear):
        return _qkv_geometry(layer, input_size, ranks)
    cut = None if ranks[1] == 1 else 1
    sizes: Sequence[int] | None = getattr(layer, "output_sizes", None)
    if sizes is None:
        return (Geometry(None, input_size, output_size, cut, ranks),)
    replicated: set[int] = getattr(layer, "replicated_shard_ids", set())
    return tuple(
        Geometry(key, input_size, size // ranks[1])
        if key in replicated
        else Geometry(key, input_size, size, cut, ranks, free_width)
        for key, size in enumerate(sizes)
    )


def _qkv_geometry(layer: Any, input_size: int, ranks: tuple[int, int]) -> tuple[Geometry, ...]:
    """Query heads are cut over all ranks; key/value heads over as many ranks as there are heads."""
    rank, count = ranks
    replicas = int(layer.num_kv_head_replicas)
    kv_ranks = (rank // replicas, max(1, count // replicas))
    heads, kv_heads = int(layer.total_num_heads), int(layer.total_num_kv_heads)
    return (
        Geometry("q", input_size, heads * int(layer.head_size), 1, ranks),
        Geometry("k", input_size, kv_heads * int(layer.head_size), 1, kv_ranks),
        Geometry("v", input_size, kv_heads * int(layer.v_head_size), 1, kv_ranks),
    )
