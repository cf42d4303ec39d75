"""Tiles by the number of query tokens: the fastest of those measured, and a workspace for all."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_exl3.attention import hopper, sparse_mla, tiles
from glm_exl3.attention.sparse_mla import workspace_shapes
from glm_exl3.attention.tiles import Tile
from glm_exl3.format.kv import BF16, FP8, INT8, LATENT, LAYOUTS, RowLayout
from kv.variants import CALLS, FEW_CALLS, HEADS

CALL = ("heads", "kind", "requests", "each", "context")
RESULTS = Path(__file__).parents[3] / "bench" / "kv" / "results"
NOISE = 1.05
UPPER = 1.1
"""What a time that only bounds another from above may lie behind."""
HOPPER, PROCESSORS = 90, 132
NAMED = pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=lambda layout: layout.name)


def test_the_tile_of_a_measured_call_is_the_fastest_right_one() -> None:
    """Of 64 heads, and of those that other results beside that one have."""
    found: dict[tuple[int, str, int, int], dict[tuple[Any, ...], float]] = defaultdict(dict)
    for path in RESULTS.glob("variants-h200*.json"):
        for row in json.loads(path.read_text())["rows"]:
            assert not row["wrong"], row
            if row["op"] == "variant":
                call = (row["heads"], row["layout"], row["requests"], row["each"])
                found[call][tuple(row["tile"].values())] = row["us"]
    wanted = {(HEADS, "bf16", *call[1:]) for call in CALLS}
    wanted |= {(HEADS, name, *call[1:]) for call in FEW_CALLS for name in ("fp8", "int8")}
    assert {call for call in found if call[0] == HEADS} == wanted
    for (heads, layout, requests, each), times in found.items():
        tile = tiles.tile_for(HOPPER, heads, LAYOUTS[layout], requests * each)
        chosen = times[astuple(tile)]
        assert chosen <= NOISE * min(times.values()), (heads, layout, requests, each, times)


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


def test_fewer_heads_take_their_plain_tile_only_where_64_heads_took_longer() -> None:
    """That file has the plain tiles of 32 and 16 heads; the same tile with 64 takes no less."""
    found = json.loads((RESULTS / "measure-h200.json").read_text())["rows"]
    timed = {tuple(row[name] for name in CALL): row for row in found if row["op"] == "attention"}
    assert {heads for heads, *_ in timed} == {64, 32, 16}
    for (heads, *call), row in timed.items():
        for layout in LAYOUTS.values():
            tokens, at64 = row["requests"] * row["each"], timed[64, *call]
            known = {
                tiles.tile_for(HOPPER, HEADS, layout, tokens): at64[f"{layout.name}_us"],
                tiles.tile_for(HOPPER, heads, layout, tokens, gluon=False): row[
                    f"{layout.name}_us"
                ],
            }
            chosen = known[tiles.tile_for(HOPPER, heads, layout, tokens)]
            assert heads == HEADS or chosen <= UPPER * min(known.values()), (row, layout.name)


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
    for heads in (64, 32, 16):
        assert sparse_mla.launch_tile(HOPPER, heads, FP8, 1) == tiles.HOPPER
        assert sparse_mla.launch_tile(HOPPER, heads, BF16, 1) == tiles.ONE
        assert sparse_mla.launch_tile(HOPPER, heads, BF16, 33) == tiles.HOPPER
    assert sparse_mla.launch_tile(HOPPER, 16, BF16, 32) == tiles.ONE
    assert sparse_mla.launch_tile(HOPPER, 8, FP8, 1).kernel == "triton"


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


@NAMED
@pytest.mark.parametrize("heads", [32, 16])
def test_without_gluon_fewer_heads_have_one_tile(heads: int, layout: RowLayout) -> None:
    found = {tiles.tile_for(HOPPER, heads, layout, n, gluon=False) for n in (1, 8, 4096)}
    assert [tile.kernel for tile in found] == ["triton"]


@NAMED
@pytest.mark.parametrize(
    ("architecture", "heads"), [(80, 64), (86, 64), (89, 64), (100, 64), (120, 64), (90, 8)]
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


def launched(
    monkeypatch: pytest.MonkeyPatch, heads: int, layout: RowLayout, tokens: int, tile: Tile
) -> tuple[list[int], int]:
    """Bytes of each workspace that a launch asks for, and its programs; no kernel runs."""
    asked, grids = list[int](), list[int]()

    class Launch:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *_, **__: grids.append(*grid)

    def allocate(*specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        asked.extend(math.prod(shape) * dtype.itemsize for shape, dtype in specs)
        return [torch.empty(0), torch.empty(0)]

    for module in (sparse_mla, hopper):
        monkeypatch.setattr(module, "attend_kernel", Launch())
    monkeypatch.setattr(sparse_mla, "merge_kernel", Launch())
    q = torch.empty(tokens, heads, LATENT, dtype=torch.bfloat16, device="meta")
    table = torch.empty(1, 1, dtype=torch.int32, device="meta")
    rows = torch.empty(1, 64, LATENT, device="meta")
    indices = torch.empty(tokens, 2176, dtype=torch.int32, device="meta")
    splits = tiles.splits_for(tokens, heads, tile, PROCESSORS)
    paged = sparse_mla.Paged(rows, table, layout)
    sparse_mla.attend(q, paged, table, indices, 1.0, tile, splits, allocate)
    return asked, grids[0]


@NAMED
@pytest.mark.parametrize("heads", [4, 8, 16, 20, 32, 64])
def test_the_reserved_workspace_holds_every_launch(
    heads: int, layout: RowLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any tile in the tables, those of other numbers of heads included."""
    every = {
        tile
        for steps in (*tiles.MEASURED.values(), *tiles.PLAIN.values())
        for _, tile in steps[layout is BF16]
    }
    every |= {tiles.tile_for(HOPPER, heads, layout, 1, gluon=False)}
    for tile in every:
        reserved = workspace_shapes(PROCESSORS, min(tile.heads, heads), 1)
        room = [4 * math.prod(shape) for shape in reserved]
        for tokens in (*range(1, PROCESSORS + 2), 2048):
            asked, programs = launched(monkeypatch, heads, layout, tokens, tile)
            assert not asked or (programs <= PROCESSORS and asked[0] <= room[0])
            assert not asked or asked[1] <= room[1]


@NAMED
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_no_launch_takes_a_larger_tile_than_the_workspace_is_for(
    heads: int, layout: RowLayout
) -> None:
    own = tiles.largest_tile(HOPPER, heads, layout)
    for tokens in (*range(1, PROCESSORS + 2), 2048):
        for gluon in (True, False):
            tile = tiles.tile_for(HOPPER, heads, layout, tokens, gluon=gluon)
            assert tile.heads <= own.heads
