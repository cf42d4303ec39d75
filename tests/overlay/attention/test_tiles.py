"""Tiles by the number of query tokens: the fastest of those measured, and a workspace for all."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from glm_exl3.attention import tiles
from glm_exl3.attention.sparse_mla import workspace_shapes
from glm_exl3.attention.tiles import Tile
from glm_exl3.format.kv import BF16, FP8, INT8, LAYOUTS, RowLayout

MEASURED = Path(__file__).parents[3] / "bench" / "expected" / "h200-1x" / "kv.json"
NOISE = 1.05
HOPPER, PROCESSORS = 90, 132


def test_the_tile_of_a_measured_call_is_the_fastest_measured() -> None:
    found: dict[tuple[str, int, int], dict[tuple[int, ...], float]] = defaultdict(dict)
    for row in json.loads(MEASURED.read_text())["kernels"]["rows"]:
        if row["op"] == "tile":
            call = (row["layout"], row["heads"], row["requests"] * row["each"])
            found[call][tuple(row["tile"])] = row["us"]
    assert {tokens for _, _, tokens in found} == {1, 8, 2048}
    for (layout, heads, tokens), times in found.items():
        tile = tiles.tile_for(HOPPER, heads, LAYOUTS[layout], tokens)
        chosen = times[tile.heads, tile.keys, tile.warps, tile.stages]
        assert chosen <= NOISE * min(times.values()), (layout, tokens, times)


@pytest.mark.parametrize(
    ("layout", "tokens", "wanted"),
    [
        (BF16, 2, (32, 32, 4, 2)),
        (BF16, 9, (64, 64, 8, 2)),
        (FP8, 2, (64, 32, 8, 2)),
        (INT8, 9, (64, 32, 8, 2)),
    ],
)
def test_sizes_between_follow_the_next_larger_measured(
    layout: RowLayout, tokens: int, wanted: tuple[int, int, int, int]
) -> None:
    assert tiles.tile_for(HOPPER, 64, layout, tokens) == Tile(*wanted, native_e4m3=True)


@pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    ("architecture", "heads"), [(80, 64), (86, 64), (89, 64), (100, 64), (120, 64), (90, 32)]
)
def test_what_was_not_measured_has_one_tile(
    architecture: int, heads: int, layout: RowLayout
) -> None:
    chosen = {tiles.tile_for(architecture, heads, layout, tokens) for tokens in (1, 8, 4096)}
    assert chosen == {tiles.largest_tile(architecture, heads, layout)}


@pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=lambda layout: layout.name)
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_the_reserved_workspace_holds_every_split_launch(heads: int, layout: RowLayout) -> None:
    most = min(tiles.largest_tile(HOPPER, heads, layout).heads, heads)
    (reserved, _), _ = workspace_shapes(PROCESSORS, most, 1)
    for tokens in range(1, PROCESSORS + 1):
        tile = tiles.tile_for(HOPPER, heads, layout, tokens)
        splits = tiles.splits_for(tokens, heads, tile, PROCESSORS)
        (rows, _), _ = workspace_shapes(tokens, heads, splits)
        assert splits == 1 or rows <= reserved
