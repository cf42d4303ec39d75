"""Time the Triton attention and indexer on a GPU, beside vLLM's fastest and the bounds.

    python -m kv.measure [--quick] [--heads 64,32,16] [--seconds 240] RESULT.json

Decode: 1, 4 and 16 requests of 8k to 512k tokens, one and eight tokens each (verify at k=7).
Prefill: a chunk of 2,048 tokens at the end of 8k to 128k. Every figure is the median of calls in a
CUDA graph, each over another layer's cache so that rows come from memory. vLLM's side holds what
its back ends do per layer: the conversion of indices and FlashAttention 3's or FlashInfer's kernel.
Both outputs are compared. Rows of 64 heads (one rank) come first, then those of more ranks by
context, all heads together: 128k, 8k, 512k, 32k; behind `--seconds` nothing new starts. The result
is written after every row; the last line and the exit status say whether every row is within its
limit. Tiles are compared by `kv.variants`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from e2e.seam import graph_us
from glm_exl3.attention import pool_calls, sparse_mla, tiles
from glm_exl3.attention.rows import write
from glm_exl3.format.kv import BF16, LATENT, LAYOUTS, RowLayout
from kv.bounds import CHOSEN, H200, Bound, attention, scoring

BLOCK, WIDTH, BUDGET, SCALE = 64, 2176, 2048, 256**-0.5
LAYERS, PASSES = 4, 3
DECODE_LIMIT, PREFILL_LIMIT = 1.5, 2.0
ONE_RANK, HEADS, CONTEXTS, QUICK = 64, (64, 32, 16), (128, 8, 512, 32), (128, 8)
LONGEST_PREFILL = 128
"""Contexts are in thousands of tokens, those that decide first."""
MOST_TOKENS = 8192 << 10  # 34 GB of bf16 rows in four layers


@dataclass(frozen=True)
class Shape:
    """What one call sees: `each` query tokens of every request."""

    kind: str
    requests: int
    each: int
    context: int
    heads: int

    @property
    def tokens(self) -> int:
        return self.requests * self.each


def shapes(heads: int, context: int) -> Iterator[Shape]:
    """Decode and prefill of `context` thousands of tokens."""
    for requests in (1, 4, 16):
        if requests * context <= MOST_TOKENS >> 10:
            for each in (1, 8):
                yield Shape("decode", requests, each, context << 10, heads)
    if context <= LONGEST_PREFILL:
        yield Shape("prefill", 1, 2048, context << 10, heads)


class Scene:
    """Random rows of `LAYERS` caches, block tables and chosen tokens of one shape."""

    def __init__(self, shape: Shape, layout: RowLayout) -> None:
        self.shape, self.layout = shape, layout
        self.random = torch.Generator("cuda").manual_seed(shape.context + shape.tokens)
        per_request = shape.context // BLOCK
        blocks = shape.requests * per_request
        width = LATENT if layout is BF16 else layout.row_bytes
        kind = torch.bfloat16 if layout is BF16 else torch.uint8
        order = torch.randperm(blocks, device="cuda", generator=self.random)
        self.table = order.view(shape.requests, per_request).int()
        self.caches = []
        for _ in range(LAYERS):
            cache = torch.empty(blocks, BLOCK, width, dtype=kind, device="cuda")
            for start in range(0, blocks * BLOCK, 1 << 18):
                count = min(1 << 18, blocks * BLOCK - start)
                slots = torch.arange(start, start + count, device="cuda")
                write(self.normal(count, LATENT), cache, slots, layout)
            self.caches.append(cache)
        self.request = torch.arange(shape.requests, device="cuda").int()
        self.request = self.request.repeat_interleave(shape.each)
        self.indices = self._indices()
        self.q = self.normal(shape.tokens, shape.heads, LATENT) * 0.35
        self.keep = torch.empty(1 << 26, dtype=torch.float32, device="cuda")

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, device="cuda", generator=self.random).bfloat16()

    def _indices(self) -> Tensor:
        """128 random pools per token in ascending order, then 15 tokens of the last pool."""
        tokens, context = self.shape.tokens, self.shape.context
        found = torch.full((tokens, WIDTH), -1, dtype=torch.int32, device="cuda")
        for start in range(0, tokens, 256):
            stop = min(tokens, start + 256)
            size = (stop - start, context // 16 - 1)
            noise = torch.rand(size, device="cuda", generator=self.random)
            pools = noise.topk(BUDGET // 16, dim=1).indices.sort(dim=1).values
            expanded = pools[:, :, None] * 16 + torch.arange(16, device="cuda")
            found[start:stop, :BUDGET] = expanded.flatten(1).int()
        found[:, BUDGET:CHOSEN] = torch.arange(context - 15, context, device="cuda").int()
        return found

    def allocate(self, *specs: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        made, used = [], 0
        for size, _ in specs:
            count = 1
            for extent in size:
                count *= extent
            made.append(self.keep[used : used + count].view(size))
            used += count
        return made

    def tile(self) -> tiles.Tile:
        """That of a launch."""
        shape = self.shape
        return sparse_mla.launch_tile(device()[0], shape.heads, self.layout, shape.tokens)

    def ours(self, cache: Tensor, tile: tiles.Tile | None = None) -> Tensor:
        shape, chosen = self.shape, tile or self.tile()
        splits = tiles.splits_for(shape.tokens, shape.heads, chosen, device()[1])
        paged = sparse_mla.Paged(cache, self.table, self.layout)
        return sparse_mla.attend(
            self.q, paged, self.request, self.indices, SCALE, chosen, splits, self.allocate
        )

    def slots(self) -> tuple[Tensor, Tensor]:
        """What vLLM's back ends do first: indices to rows of the cache, and how many count."""
        from vllm.v1.attention.backends.mla.sparse_utils import (
            triton_convert_req_index_to_global_index,
        )

        found: tuple[Tensor, Tensor] = triton_convert_req_index_to_global_index(
            self.request,
            self.table,
            self.indices,
            BLOCK_SIZE=BLOCK,
            NUM_TOPK_TOKENS=WIDTH,
            BLOCK_STRIDE_ROWS=BLOCK,
            return_valid_counts=True,
        )
        return found


def device() -> tuple[int, int]:
    """Architecture (90) and number of multiprocessors."""
    found = torch.cuda.get_device_properties(0)
    return found.major * 10 + found.minor, found.multi_processor_count


def flash_attention(scene: Scene) -> Callable[[Tensor], Tensor]:
    """vLLM's FLASH_ATTN_MLA_SPARSE: FlashAttention 3 with the latent as value and q_v."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    ends = torch.arange(scene.shape.tokens + 1, device="cuda").int()
    nothing = scene.q.new_zeros(*scene.q.shape[:-1], 64)

    def call(cache: Tensor) -> Tensor:
        slots, counts = scene.slots()
        values = cache.view(-1, 1, 1, LATENT)
        return flash_attn_varlen_func(
            q=nothing,
            k=values[..., :64],
            v=values,
            q_v=scene.q,
            max_seqlen_q=1,
            cu_seqlens_q=ends,
            max_seqlen_k=WIDTH,
            seqused_k=counts,
            block_table=slots,
            softmax_scale=SCALE,
            causal=True,
            fa_version=3,
        )

    return call


def flashinfer(scene: Scene) -> Callable[[Tensor], Tensor]:
    """vLLM's FLASHINFER_MLA_SPARSE_SM90, planned once for exact lengths."""
    from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90 import _SM90State

    shape = scene.shape
    state = _SM90State(
        torch.device("cuda"),
        shape.heads,
        torch.bfloat16,
        shape.tokens,
        WIDTH,
        LATENT,
        0,
        SCALE,
        BUDGET,
        16,
    )
    state.plan(shape.tokens, torch.full((shape.tokens,), CHOSEN, dtype=torch.int32), None, None)
    rotary = scene.q.new_empty(shape.tokens, shape.heads, 0)

    def call(cache: Tensor) -> Tensor:
        slots, _ = scene.slots()
        state.pack_indices(slots)
        flat = cache.view(-1, 1, LATENT)
        return state.wrapper.run(scene.q, rotary, flat, flat[..., LATENT:])

    return call


def attention_row(shape: Shape) -> dict[str, Any]:
    """All layouts and vLLM's two back ends for one shape."""
    row: dict[str, Any] = {"op": "attention", **asdict(shape)}
    wanted: Tensor | None = None
    for layout in LAYOUTS.values():
        scene = Scene(shape, layout)
        found = scene.ours(scene.caches[0]).float()
        row[f"{layout.name}_us"] = graph_us(scene.ours, scene.caches * PASSES)
        row[f"{layout.name}_tile"] = named(scene.tile())
        wide = (shape.tokens, shape.heads, shape.context, layout.row_bytes, shape.requests)
        bound: Bound = attention(H200, *wide)
        row[f"{layout.name}_bound_us"], row[f"{layout.name}_bound"] = bound.us, bound.cause
        if layout is not BF16:
            row[f"{layout.name}_away"] = away(found, wanted)
            continue
        wanted = found
        for name, make in (("fa3", flash_attention), ("flashinfer", flashinfer)):
            try:
                call = make(scene)
                row[f"{name}_away"] = away(call(scene.caches[0]).float(), wanted)
                row[f"{name}_us"] = graph_us(call, scene.caches * PASSES)
            except Exception as error:  # noqa: BLE001 - the row says why there is no figure
                row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
    peers = [row[name] for name in ("fa3_us", "flashinfer_us") if name in row]
    if peers:
        row["ratio"] = row["bf16_us"] / min(peers)
        row["limit"] = DECODE_LIMIT if shape.kind == "decode" else PREFILL_LIMIT
    return row


def named(tile: tiles.Tile) -> str:
    return f"{tile.kernel} {tile.heads}x{tile.keys}, {tile.warps}, {tile.stages}"


def away(found: Tensor, wanted: Tensor | None) -> float | None:
    return None if wanted is None else float((found - wanted).norm() / wanted.norm())


def indexer_row(requests: int, each: int, context: int) -> dict[str, Any]:
    """Scores, selection and expansion for 16 heads."""
    from glm_exl3.attention.indexer_op import select

    tokens, blocks = requests * each, context // (16 * 64)
    random = torch.Generator("cuda").manual_seed(context)
    pages = torch.randint(0, 120, (requests * blocks, 64, 132), device="cuda", generator=random)
    pages = pages.to(torch.uint8)
    pages.view(requests * blocks, -1)[:, 64 * 128 :].view(torch.float32).fill_(0.01)
    table = torch.arange(requests * blocks, device="cuda").view(requests, blocks).int()
    cache = pool_calls.PoolCache(pages, table, torch.empty(1, 2, 32, 128, device="cuda"))
    positions = torch.arange(context - each, context, device="cuda").repeat(requests)
    request = torch.arange(requests, device="cuda").int().repeat_interleave(each)
    nothing = torch.empty(0, device="cuda")
    step = pool_calls.Step(nothing, nothing, nothing, positions, request, nothing, nothing, nothing)
    queries = torch.randn(tokens, 16, 128, device="cuda").to(torch.float8_e4m3fn)
    asked = pool_calls.Asked(queries, torch.randn(tokens, 16, device="cuda").abs())
    out = torch.empty(tokens, WIDTH, dtype=torch.int32, device="cuda")

    def call(_: Tensor) -> None:
        pool_calls.choose(asked, step, cache, context, BUDGET, 512 << 20, select, out)

    us = graph_us(call, [nothing] * LAYERS * PASSES)
    bound = scoring(H200, tokens, 16, context, requests)
    names = {"op": "indexer", "requests": requests, "each": each, "context": context}
    return {**names, "us": us, "bound_us": bound.us, "bound": bound.cause}


def line(row: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.2f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in row.items()
    )


def rows(heads: Sequence[int], quick: bool) -> Iterator[partial[dict[str, Any]]]:
    """What is measured, the most wanted first."""
    contexts = QUICK if quick else CONTEXTS
    if ONE_RANK in heads:
        for context in contexts:
            yield from (partial(attention_row, shape) for shape in shapes(ONE_RANK, context))
        for requests, each, context in ((1, 1, 1 << 17), (16, 8, 1 << 17), (1, 2048, 1 << 17)):
            yield partial(indexer_row, requests, each, context)
    for context in contexts:
        for fewer in heads:
            if fewer != ONE_RANK:
                yield from (partial(attention_row, shape) for shape in shapes(fewer, context))


def worst(judged: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The largest ratio to vLLM's fastest, of decode and of prefill."""
    return {
        f"{kind}_worst_ratio": max((r["ratio"] for r in judged if r["kind"] == kind), default=None)
        for kind in ("decode", "prefill")
    }


def verdict(found: list[dict[str, Any]], planned: int) -> dict[str, Any]:
    """The worst ratios of all and by heads of a rank, and whether all rows hold."""
    judged = [row for row in found if "ratio" in row]
    by_heads = {heads: [r for r in judged if r["heads"] == heads] for heads in HEADS}
    compared = [row for row in found if row["op"] == "attention"]
    slow = [row for row in judged if row["ratio"] > row["limit"]]
    return {
        **worst(judged),
        "by_heads": {str(heads): worst(own) for heads, own in by_heads.items() if own},
        "rows": len(found),
        "planned_rows": planned,
        "without_peer": len(compared) - len(judged),
        "slow": len(slow),
        "passed": bool(judged) and not slow and all(worst(judged).values()),
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Time the latent cache's kernels on a GPU.")
    made.add_argument("result", type=Path)
    made.add_argument("--quick", action="store_true", help="8k and 128k only")
    made.add_argument("--heads", type=heads_of, default=HEADS, help="of a rank: 64,32,16")
    made.add_argument("--seconds", type=float, default=240, help="start no row after these")
    return made


def heads_of(text: str) -> tuple[int, ...]:
    """`32,16` as numbers. Raises what argparse shows."""
    found = tuple(int(word) for word in text.split(",") if word.isdecimal())
    if len(found) != text.count(",") + 1 or not set(found) <= set(HEADS):
        raise argparse.ArgumentTypeError(
            f"{text!r} names other numbers of heads than one, two and four ranks have; "
            f"give some of {','.join(map(str, HEADS))}"
        )
    return found


def main() -> int:
    given = parser().parse_args()
    began, found = time.monotonic(), list[dict[str, Any]]()
    planned = list(rows(given.heads, given.quick))
    record: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(0),
        "date": time.strftime("%Y-%m-%d"),
        "rows": found,
    }
    for make in planned:
        if time.monotonic() - began > given.seconds:
            break
        try:
            found.append(make())
        except Exception as error:  # noqa: BLE001 - the next row may still work
            failed = {"op": "failed", "case": str(make.args), "error": f"{error!r}"[:300]}
            found.append(failed)
        torch.cuda.empty_cache()
        record["verdict"] = verdict(found, len(planned))
        given.result.write_text(json.dumps(record, indent=1))
        print(line(found[-1]), flush=True)
    print("kv.measure:", record["verdict"])
    return int(not record["verdict"]["passed"])


if __name__ == "__main__":
    sys.exit(main())
