"""Time SM90's own attention kernel and tiles of the plain one on a GPU, and check each of them.

    python -m kv.variants [--heads 64] [--seconds 100] RESULT.json

128k tokens of context, from one query token to 2,048, 64 heads or those asked for (`32,16`). All
kernels are compiled first, in threads. A variant whose output leaves the reference is marked
`wrong`, whatever its time; the reference is float64 over the stored rows, for a few query tokens,
and the first variant's output for all of them. `docs/kv-cache.md`, "Back end", says what the
variants are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from e2e.seam import graph_us
from glm_exl3.attention import hopper, sparse_mla, tiles
from glm_exl3.attention.tiles import Tile
from glm_exl3.format.kv import BF16, LAYOUTS, RowLayout
from glm_exl3.ref.kv_rows import read_rows
from kv.measure import BLOCK, PASSES, SCALE, WIDTH, Scene, Shape, device, heads_of

THREADS = 12
H200_PROCESSORS = 132
REFERENCE_TOKENS = 3
LIMIT = 4e-3  # of the output's norm, as in tests/gpu/test_attention.py
CONTEXT, HEADS = 1 << 17, 64
CALLS = (
    ("prefill", 1, 2048), ("decode", 16, 8), ("decode", 4, 8), ("decode", 16, 1),
    ("decode", 1, 8), ("decode", 1, 1), ("decode", 4, 1), ("decode", 8, 8), ("prefill", 1, 512),
)  # fmt: skip
FEW_CALLS = (("prefill", 1, 2048), ("decode", 16, 8), ("decode", 1, 8), ("decode", 1, 1))
"""For quantised rows. The calls that decide come first."""
TRITON: dict[str, Tile] = {
    "16x32": Tile(16, 32, 4, 2, native_e4m3=True),
    "32x32": Tile(32, 32, 4, 2, native_e4m3=True),
    "64x32": Tile(64, 32, 8, 2, native_e4m3=True),
    "64x64": Tile(64, 64, 8, 2, native_e4m3=True),
}
HOPPER: dict[str, Tile] = {"hopper": tiles.HOPPER}
VERSIONS = ("torch", "triton")
PLACE = ("layout", "heads", "requests", "each", "name")
"""What tells the rows of a result apart; those of edges have no requests."""


@dataclass(frozen=True)
class Trial:
    """One variant on one call; the first of a call is what the others are compared with."""

    shape: Shape
    layout: RowLayout
    name: str
    tile: Tile


def trials(heads: Sequence[int] = (HEADS,)) -> Iterator[list[Trial]]:
    """All variants of one call together, since they share its rows; bf16 first."""
    for layout in LAYOUTS.values():
        for count in heads:
            for kind, requests, each in CALLS if layout is BF16 else FEW_CALLS:
                shape = Shape(kind, requests, each, CONTEXT, count)
                seen: dict[Tile, str] = {}
                for name, tile in tiles_of(shape, layout).items():
                    seen.setdefault(tile, name)
                yield [Trial(shape, layout, name, tile) for tile, name in seen.items()]


def tiles_of(shape: Shape, layout: RowLayout) -> dict[str, Tile]:
    """What is timed on one call, the plain kernel's own choice first."""
    plain = tiles.tile_for(90, shape.heads, layout, shape.tokens, gluon=False)
    if shape.heads < HEADS:
        small = [name for name, tile in TRITON.items() if tile.heads <= shape.heads]
        return {"plain": plain, **HOPPER, **{name: TRITON[name] for name in small}}
    large = "64x64" if layout is BF16 else "64x32"
    names = {"plain": plain, large: TRITON[large], **HOPPER}
    if shape.tokens == 1:
        names["16x32"] = TRITON["16x32"]
    if 1 < shape.tokens <= 16:  # noqa: PLR2004 - where the small tile was fastest
        names["32x32"] = TRITON["32x32"]
    return names


class Compiled:
    """Stands in for a kernel: a launch only compiles it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.kernel.warmup, grid=grid)


def compile_all(calls: Sequence[Sequence[Trial]]) -> dict[tuple[Any, ...], str]:
    """Compile every variant in threads, launching none; what failed, by kernel."""
    failed: dict[tuple[Any, ...], str] = {}

    def one(trial: Trial, scene: Scene) -> None:
        try:
            scene.ours(scene.caches[0], trial.tile)
        except Exception as error:  # noqa: BLE001 - the row says why there is no figure
            failed[built(trial)] = f"{type(error).__name__}: {error}"[:300]

    work: dict[tuple[Any, ...], tuple[Trial, Scene]] = {}
    for call in calls:
        shape = Shape(call[0].shape.kind, 1, call[0].shape.tokens, 1 << 12, call[0].shape.heads)
        scene = Scene(shape, call[0].layout)
        work |= {built(trial): (trial, scene) for trial in call}
    kernels = [(sparse_mla, "attend_kernel"), (sparse_mla, "merge_kernel")]
    kernels += [(hopper, "attend_kernel")]
    originals = [(module, name, getattr(module, name)) for module, name in kernels]
    for module, name, kernel in originals:
        setattr(module, name, Compiled(kernel))
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda pair: one(*pair), work.values()))
    finally:
        for module, name, kernel in originals:
            setattr(module, name, kernel)
    return failed


def place(trial: Trial) -> tuple[str, int, int, int, str]:
    shape = trial.shape
    return trial.layout.name, shape.heads, shape.requests, shape.each, trial.name


def built(trial: Trial) -> tuple[Any, ...]:
    """What a compiled kernel depends on; of the splits SM90's own only whether there are any."""
    shape = trial.shape
    splits = tiles.splits_for(shape.tokens, shape.heads, trial.tile, H200_PROCESSORS)
    width = tiles.split_columns(WIDTH, splits, trial.tile.keys)
    own = width >= WIDTH if trial.tile.kernel != "triton" else width
    return trial.layout.name, trial.tile, own


def reference(scene: Scene) -> tuple[Tensor, Tensor]:
    """A few query tokens and their exact outputs over the stored rows, `[n]` and `[n, H, 512]`."""
    some = torch.linspace(0, scene.shape.tokens - 1, REFERENCE_TOKENS, device="cuda")
    some = some.long().unique()
    exact = []
    for token in some.tolist():
        ids = scene.indices[token]
        ids = ids[ids >= 0].long()
        pages = scene.table[scene.request[token].long(), ids // BLOCK].long()
        stored = scene.caches[0][pages, ids % BLOCK].contiguous().view(torch.uint8)
        values = read_rows(stored, scene.layout).double()
        scores = scene.q[token].double() @ values.T * SCALE
        exact.append(torch.softmax(scores, -1) @ values)  # of no rows: zeros
    return some, torch.stack(exact)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def rows(call: Sequence[Trial], failed: dict[tuple[Any, ...], str]) -> Iterator[dict[str, Any]]:
    """Time and error of each variant of one call."""
    scene = Scene(call[0].shape, call[0].layout)
    some, exact = reference(scene)
    first: Tensor | None = None
    for trial in call:
        shape = trial.shape
        row = {"op": "variant", **asdict(shape), "layout": trial.layout.name, "name": trial.name}
        row |= {"tile": asdict(trial.tile)}
        if built(trial) in failed:
            yield {**row, "error": failed[built(trial)]}
            continue
        try:
            splits = tiles.splits_for(shape.tokens, shape.heads, trial.tile, device()[1])
            found = scene.ours(scene.caches[0], trial.tile)
            first = found if first is None else first
            row |= {"splits": splits, "away": distance(found[some], exact)}
            row["apart"] = distance(found, first)
            row["wrong"] = not (row["away"] <= LIMIT and row["apart"] <= 2 * LIMIT)
            row["us"] = graph_us(partial(scene.ours, tile=trial.tile), scene.caches * PASSES)
        except Exception as error:  # noqa: BLE001 - the next variant may still work
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            row["fatal"] = dead()
        yield row


def dead() -> bool:
    """Whether an error left this process without a usable GPU."""
    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - that is the answer
        return True
    return False


def again(arguments: Sequence[str], kernel: str, seconds: float) -> None:
    """Start over in a new process image, without the kernel that broke the GPU's context."""
    print(f"kv.variants: {kernel} broke the CUDA context; going on without it", flush=True)
    words = [*arguments, "--without", kernel, "--seconds", f"{seconds:.0f}"]
    os.execv(sys.executable, [sys.executable, "-m", "kv.variants", *words])  # noqa: S606 - itself


def edges(layout: RowLayout, heads: int, name: str, tile: Tile) -> dict[str, Any]:
    """Absent, foreign and no indices at all, in blocks with poison between and around them."""
    scene = Scene(Shape("edges", 1, 3, 1 << 12, heads), layout)
    scene.indices[0] = -1
    scene.indices[1, 5::7] = -1
    some, exact = reference(scene)
    scene.indices[1, 5::7] = 1 << 20
    cache = scene.caches[0]
    poison = float("nan") if layout is BF16 else 0xFF
    whole = cache.new_full((cache.shape[0] + 1, BLOCK + 16, cache.shape[2]), poison)
    whole[1:, :BLOCK] = cache
    scene.table += 1
    row: dict[str, Any] = {"op": "edges", "layout": layout.name, "heads": heads, "name": name}
    row |= {"tile": asdict(tile)}
    try:
        paged = sparse_mla.Paged(whole[:, :BLOCK], scene.table, layout)
        asked = (scene.q, paged, scene.request, scene.indices, SCALE, tile)
        for splits in (1, 8):
            found = sparse_mla.attend(*asked, splits, scene.allocate)
            row[f"away_{splits}"] = distance(found[1:], exact[1:])
            row[f"empty_{splits}"] = not found[0].any().item()
        right = all(row[f"away_{n}"] <= LIMIT and row[f"empty_{n}"] for n in (1, 8))
        row["wrong"] = not right
    except Exception as error:  # noqa: BLE001 - the next variant may still work
        row["error"] = f"{type(error).__name__}: {error}"[:300]
        row["fatal"] = dead()
    return row


def line(row: dict[str, Any]) -> str:
    call = f"{row['layout']:5} {row['heads']:2} heads"
    if row["op"] == "edges":
        said = row.get("error") or ("WRONG" if row["wrong"] else "right")
        numbers = {name: value for name, value in row.items() if name[:4] in {"away", "empt"}}
        return f"{call} edges     {row['name']:17} {said} {numbers}"
    call += f" {row['requests']:3}x{row['each']:<5} {row['name']:17}"
    if "us" not in row:
        return f"{call} {row.get('error', 'no figure')}"
    errors = f"away {row['away']:.1e} apart {row['apart']:.1e}"
    return f"{call} {row['us']:9.1f} us  {errors}{'  WRONG' if row['wrong'] else ''}"


def table(found: Sequence[dict[str, Any]]) -> str:
    """One line per call, one column per variant; `!` stands behind a wrong one."""
    found = [row for row in found if row["op"] == "variant"]
    names = list(dict.fromkeys(row["name"] for row in found))
    lines = ["| call | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    cells: dict[str, dict[str, str]] = {}
    for row in found:
        call = f"{row['layout']} {row['heads']} heads {row['requests']}x{row['each']}"
        text = f"{row['us']:.1f}{'!' if row['wrong'] else ''}" if "us" in row else "error"
        cells.setdefault(call, {})[row["name"]] = text
    for call, by_name in cells.items():
        lines.append(f"| {call} | " + " | ".join(by_name.get(n, "") for n in names) + " |")
    return "\n".join(lines)


def everything(
    calls: Sequence[Sequence[Trial]],
    failed: dict[tuple[Any, ...], str],
    kernels: Sequence[tuple[RowLayout, int, str]],
) -> Iterator[dict[str, Any]]:
    """Edges of each of `kernels`, then rows of each call; what has edges wrong is timed anyway."""
    for layout, heads, name in kernels:
        yield edges(layout, heads, name, HOPPER[name])
    for call in calls:
        yield from rows(call, failed)
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kv.variants")
    parser.add_argument("result", type=Path)
    parser.add_argument("--heads", type=heads_of, default=(HEADS,), help="of a rank: 64,32,16")
    parser.add_argument("--seconds", type=float, default=100, help="start no call after these")
    parser.add_argument("--without", action="append", default=[], help="a kernel to leave out")
    given = parser.parse_args()
    began, old = time.monotonic(), list[dict[str, Any]]()
    if given.without:
        old = json.loads(given.result.read_text())["rows"] if given.result.exists() else []
    had = {tuple(r.get(name) for name in PLACE) for r in old}
    calls = [
        [t for t in call if t.tile.kernel not in given.without and place(t) not in had]
        for call in trials(given.heads)
    ]
    calls = [call for call in calls if call]
    failed = compile_all(calls)
    record: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(0),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in VERSIONS},
        "compile_s": round(time.monotonic() - began, 1),
        "rows": (found := old),
    }
    print(f"compiled in {record['compile_s']} s, {len(failed)} failed", flush=True)
    kept = [
        (layout, heads, name)
        for layout in LAYOUTS.values()
        for heads in given.heads
        for name, tile in HOPPER.items()
        if tile.kernel not in given.without and (layout.name, heads, None, None, name) not in had
    ]
    for row in everything(calls, failed, kept):
        found.append(row)
        given.result.write_text(json.dumps(record, indent=1))
        print(line(row), flush=True)
        left = given.seconds - (time.monotonic() - began)
        if row.get("fatal"):
            again(sys.argv[1:], row["tile"]["kernel"], left)
        if left < 0:
            break
    print(table(found))
    good = [row for row in found if not row.get("wrong", True)]
    print(f"kv.variants: {len(good)} of {len(found)} rows right, {time.monotonic() - began:.0f} s")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
