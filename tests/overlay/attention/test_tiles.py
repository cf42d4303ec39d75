"""Tiles by the number of query tokens: the fastest of those measured, and a workspace for all."""

from __future__ import annotations

import json
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from glm_exl3.attention import sparse_mla, tiles
from glm_exl3.attention.sparse_mla import workspace_shapes
from glm_exl3.attention.tiles import Tile
from glm_exl3.format.kv import BF16, FP8, INT8, LAYOUTS, RowLayout
from kv.variants import CALLS, FEW_CALLS, HEADS

RESULTS = Path(__file__).parents[3] / "bench" / "kv" / "results"
NOISE = 1.05
HOPPER, PROCESSORS = 90, 132


def test_the_tile_of_a_measured_call_is_the_fastest_right_one() -> None:
    found: dict[tuple[str, int, int], dict[tuple[Any, ...], float]] = defaultdict(dict)
    for row in json.loads((RESULTS / "variants-h200.json").read_text())["rows"]:
        assert not row["wrong"], row
        if row["op"] == "variant":
            call = (row["layout"], row["requests"], row["each"])
            found[call][tuple(row["tile"].values())] = row["us"]
    wanted = {("bf16", *call[1:]) for call in CALLS}
    wanted |= {(name, *call[1:]) for call in FEW_CALLS for name in ("fp8", "int8")}
    assert set(found) == wanted
    for (layout, requests, each), times in found.items():
        tile = tiles.tile_for(HOPPER, HEADS, LAYOUTS[layout], requests * each)
        chosen = times[astuple(tile)]
        assert chosen <= NOISE * min(times.values()), (layout, requests, each, times)


def test_the_plain_tile_of_a_measured_call_is_the_fastest_plain_one() -> None:
    found: dict[tuple[str, int], dict[tuple[int, ...], float]] = defaultdict(dict)
    for row in json.loads((RESULTS / "tiles-h200.json").read_text())["rows"]:
        assert row["heads"] == HEADS
        found[row["layout"], row["requests"] * row["each"]][tuple(row["tile"])] = row["us"]
    assert {tokens for _, tokens in found} == {1, 8, 2048}
    for (layout, tokens), times in found.items():
        tile = tiles.tile_for(HOPPER, HEADS, LAYOUTS[layout], tokens, gluon=False)
        assert tile.kernel == "triton"
        chosen = times[tile.heads, tile.keys, tile.warps, tile.stages]
        assert chosen <= NOISE * min(times.values()), (layout, tokens, times)


@pytest.mark.parametrize(
    ("layout", "tokens", "wanted"),
    [
        (BF16, 2, (32, 32, 4, 2)),
        (BF16, 8, (32, 32, 4, 2)),
        (BF16, 9, (64, 64, 8, 2)),
        (FP8, 2, (64, 32, 8, 2)),
        (INT8, 9, (64, 32, 8, 2)),
    ],
)
def test_sizes_between_follow_the_next_larger_measured(
    layout: RowLayout, tokens: int, wanted: tuple[int, int, int, int]
) -> None:
    plain = tiles.tile_for(HOPPER, HEADS, layout, tokens, gluon=False)
    assert plain == Tile(*wanted, native_e4m3=True)
    assert tiles.tile_for(HOPPER, HEADS, layout, tokens) == tiles.HOPPER


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget what was imported, before and afterwards."""
    sparse_mla.hopper_module.cache_clear()
    yield
    sparse_mla.hopper_module.cache_clear()


def test_with_gluon_the_measured_tile_is_launched(fresh: None) -> None:
    assert sparse_mla.launch_tile(HOPPER, HEADS, FP8, 1) == tiles.HOPPER
    assert sparse_mla.launch_tile(HOPPER, 32, FP8, 1).kernel == "triton"


@pytest.mark.parametrize(
    ("absent", "names"),
    [
        ("triton.experimental.gluon", "Gluon (ModuleNotFoundError"),
        ("warpgroup_mma", "Gluon (AttributeError"),
    ],
)
def test_without_gluon_the_plain_tile_is_launched_and_the_log_says_why_once(
    absent: str,
    names: str,
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if "." in absent:
        monkeypatch.setitem(sys.modules, absent, None)
    else:
        monkeypatch.delattr(f"triton.experimental.gluon.language.nvidia.hopper.{absent}")
    monkeypatch.delitem(sys.modules, "glm_exl3.attention.hopper", raising=False)
    monkeypatch.setattr(sparse_mla._log, "propagate", True)
    for parent in ("vllm", "vllm.glm_exl3"):
        monkeypatch.setattr(logging.getLogger(parent), "propagate", True)
    for layout in LAYOUTS.values():
        for tokens in (1, 8, 4096):
            found = sparse_mla.launch_tile(HOPPER, HEADS, layout, tokens)
            assert found == tiles.tile_for(HOPPER, HEADS, layout, tokens, gluon=False)
    (said,) = caplog.messages
    assert names in said
    assert "plain kernel" in said


@pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    ("architecture", "heads"), [(80, 64), (86, 64), (89, 64), (100, 64), (120, 64), (90, 32)]
)
def test_what_was_not_measured_has_one_tile(
    architecture: int, heads: int, layout: RowLayout
) -> None:
    chosen = {
        tiles.tile_for(architecture, heads, layout, tokens, gluon=gluon)
        for tokens in (1, 8, 4096)
        for gluon in (True, False)
    }
    assert chosen == {tiles.largest_tile(architecture, heads, layout)}


@pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=lambda layout: layout.name)
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("gluon", [True, False])
def test_the_reserved_workspace_holds_every_split_launch(
    heads: int, layout: RowLayout, gluon: bool
) -> None:
    most = min(tiles.largest_tile(HOPPER, heads, layout).heads, heads)
    (reserved, _), _ = workspace_shapes(PROCESSORS, most, 1)
    for tokens in range(1, PROCESSORS + 1):
        tile = tiles.tile_for(HOPPER, heads, layout, tokens, gluon=gluon)
        splits = tiles.splits_for(tokens, heads, tile, PROCESSORS)
        (rows, _), _ = workspace_shapes(tokens, heads, splits)
        assert splits == 1 or rows <= reserved
