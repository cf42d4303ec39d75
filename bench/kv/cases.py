"""Every Triton kernel of the latent cache with the arguments it is compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from glm_exl3.attention import hopper, pools, rows, sparse_mla, tiles
from glm_exl3.format.kv import BF16, LAYOUTS, RowLayout

ARCHITECTURES = (80, 86, 89, 90, 120, 121)
HEADS = (64, 32, 16)
SM90_TOKENS = (4096, 64, tiles.FEW, 1)
"""Of SM90, whose tile depends on them: at least one number for each step of its tables."""
COLUMNS = 2176
PROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 120: 188, 121: 48}
"""Of an A100, A40, L40S, H200, RTX PRO 6000 and GB10; they set the splits that are compiled."""


@dataclass(frozen=True)
class Case:
    """One compilation. `signature` maps arguments to types, `constants` the rest to values.

    `heads`: numbers of heads of a rank that it serves; they are an argument, not a constant.
    """

    what: str
    architecture: int
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    heads: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        served = "/".join(map(str, self.heads))
        return f"{self.what}, {served} heads" if served else self.what


def _types(pointers: dict[str, str], integers: str, floats: str = "") -> dict[str, str]:
    types = {name: f"*{kind}" for name, kind in pointers.items()}
    types |= dict.fromkeys(integers.split(), "i32")
    return types | dict.fromkeys(floats.split(), "fp32")


def _attend_types(layout: RowLayout, *more: str) -> dict[str, str]:
    cache = "bf16" if layout is BF16 else "u8"
    pointers = {"q": "bf16", "cache": cache, "table": "i32", "request": "i32", "indices": "i32"}
    pointers |= {"out": "bf16", "partial": "fp32", "lse": "fp32"}
    integers = (
        "heads columns table_width block_tokens q_stride block_stride row_stride table_stride "
        "index_stride splits"
    )
    return _types(pointers, " ".join((integers, *more)), "scale_log2")


def attend(
    architecture: int, heads: int, layout: RowLayout, tokens: int, *, gluon: bool = True
) -> Case:
    """The attention kernel with the tile and the splits that a launch would take."""
    tile = tiles.tile_for(architecture, heads, layout, tokens, gluon=gluon)
    splits = tiles.splits_for(tokens, heads, tile, PROCESSORS[architecture])
    width = tiles.split_columns(COLUMNS, splits, tile.keys)
    if tile.kernel != "triton":
        return on_hopper(layout, heads, whole=width >= COLUMNS)
    constants = {
        "SPLIT": width,
        "SCAN": 1 << (width - 1).bit_length(),
        "BH": tile.heads,
        "BK": tile.keys,
        "LAYOUT": sparse_mla.kernel_layout(layout, tile),
        "WHOLE": width >= COLUMNS,
        "STAGES": tile.stages,
        "WIDE": False,
    }
    shape = "whole" if width >= COLUMNS else f"{-(-COLUMNS // width)} splits"
    name = f"attend {layout.name} {shape}"
    kernel, types = sparse_mla.attend_kernel, _attend_types(layout)
    return Case(name, architecture, kernel, types, constants, tile.warps, (heads,))


def on_hopper(layout: RowLayout, heads: int, *, whole: bool) -> Case:
    """SM90's own kernel, which masks the heads that are missing to 64."""
    constants = {
        "SCAN": 1 << (COLUMNS - 1).bit_length(),
        "LAYOUT": layout.name,
        "WHOLE": whole,
    }
    name = f"hopper {layout.name} {'whole' if whole else 'splits'}"
    types = _attend_types(layout, "width")
    return Case(name, 90, hopper.attend_kernel, types, constants, hopper.WARPS, (heads,))


def merge(architecture: int) -> Case:
    types = _types({"partial": "fp32", "lse": "fp32", "out": "bf16"}, "heads splits")
    constants = {"SPLITS": 64, "WIDE": False}
    return Case("merge", architecture, sparse_mla.merge_kernel, types, constants, 4)


def write(architecture: int, layout: RowLayout) -> Case:
    pointers = {"latents": "bf16", "cache": "bf16" if layout is BF16 else "u8", "slots": "i64"}
    types = _types(pointers, "block_tokens latent_stride block_stride row_stride")
    name, constants = f"write {layout.name}", {"LAYOUT": layout.name}
    return Case(name, architecture, rows.write_kernel, types, constants, 4)


def indexer(architecture: int) -> Iterator[Case]:
    """The indexer's kernels for 16 heads and 64 pools per page."""
    step = {"keys": "bf16", "gates": "bf16"}
    ring = "ring_block_stride ring_half_stride ring_row_stride"
    pages = "cache_block_stride table_stride table_width"
    yield Case(
        "rotate",
        architecture,
        pools.rotate_kernel,
        _types({"x": "bf16", "values": "u8", "scales": "fp32"}, "count"),
        {"ROWS": pools.ROWS, "WIDE": False},
        4,
    )
    places = {"positions": "i64", "request": "i32", "ring_slots": "i64", "ring": "bf16"}
    yield Case(
        "complete",
        architecture,
        pools.complete_kernel,
        _types(
            step | places | {"ape": "fp32", "query_start": "i32", "cache": "u8", "table": "i32"},
            f"key_stride gate_stride {ring} {pages}",
        ),
        {"RING": 32, "PAGE": 64, "WIDE": False},
        4,
    )
    yield Case(
        "keep",
        architecture,
        pools.keep_kernel,
        _types(step | places | {"lengths": "i32"}, f"key_stride gate_stride {ring}"),
        {"RING": 32},
        1,
    )
    asked = {"queries": "u8", "weights": "fp32", "positions": "i64", "request": "i32"}
    for together in (1, 4):
        yield Case(
            f"score {together} tokens",
            architecture,
            pools.score_kernel,
            _types(
                asked | {"cache": "u8", "table": "i32", "scores": "fp32"},
                f"tokens heads query_stride weight_stride {pages} score_stride",
            ),
            {"PAGE": 64, "BT": together, "BH": 16, "BP": pools.SCORED_POOLS, "WIDE": False},
            4,
        )
    yield Case(
        "expand",
        architecture,
        pools.expand_kernel,
        _types({"pools": "i32", "positions": "i64", "out": "i32"}, "out_stride width"),
        {"POOLS": 128, "SCORED": True},
        4,
    )


def all_cases() -> list[Case]:
    """Everything once, each with all heads that it serves: attention, then the small kernels."""
    layouts = list(LAYOUTS.values())
    cases = [
        attend(architecture, heads, layout, tokens)
        for heads, tokens in ((64, 4096), (32, 4096), (16, 4096), (64, 1), (32, 1), (16, 1))
        for architecture in ARCHITECTURES
        for layout in layouts
    ]
    cases += [
        attend(90, heads, layout, tokens, gluon=gluon)
        for heads in HEADS
        for gluon in (True, False)
        for tokens in SM90_TOKENS
        for layout in layouts
    ]
    for architecture in ARCHITECTURES:
        cases += [merge(architecture), *(write(architecture, one) for one in layouts)]
        cases += indexer(architecture)
    unique: dict[tuple[object, ...], Case] = {}
    for case in cases:
        constants = tuple(sorted(case.constants.items()))
        kernel = f"{case.kernel.__module__}.{case.kernel.__name__}"
        key = (kernel, case.architecture, constants, case.warps)
        served = {*unique.get(key, case).heads, *case.heads}
        unique[key] = replace(case, heads=tuple(sorted(served, reverse=True)))
    return list(unique.values())


def sample() -> list[Case]:
    """One attention kernel per architecture, each layout on an old and on a new one; the small
    kernels on the oldest architecture; SM90's own once.
    """
    layouts = list(LAYOUTS.values())
    cases = [
        attend(architecture, 16, layouts[place % 3], 1 if place % 2 else 4096)
        for place, architecture in enumerate(ARCHITECTURES)
    ]
    cases += [on_hopper(layouts[1], 64, whole=True)]
    return [*cases, merge(80), write(80, layouts[1]), *indexer(80)]
