"""The attention and writer kernels under Triton's interpreter against float64.

    python interpreted_attention.py RESULT.json

The result names each property and `passed` or what broke it. Sizes are drawn by hypothesis; the
indices of a row hold -1 anywhere, may lie beyond the block table, and may all be absent.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from gluon_player import Played
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from interpreted_base import main

from glm_exl3.attention import hopper, rows, sparse_mla
from glm_exl3.attention.tiles import Tile
from glm_exl3.format.kv import BF16, FP8, INT8, LATENT, LAYOUTS, RowLayout
from glm_exl3.ref import kv_rows
from glm_exl3.ref.attention import sparse_mqa

hopper.attend_kernel = Played()
SCALE = 256**-0.5
BLOCK = 16
TILES = (
    Tile(16, 16, 4, 2, native_e4m3=False),
    Tile(64, 64, 8, 2, native_e4m3=True, kernel="hopper"),
)
LIMITS = {BF16: 4e-3, FP8: 3e-2, INT8: 1.5e-2}
QUICK = settings(
    max_examples=int(os.environ.get("EXAMPLES", "4")),
    deadline=None,
    derandomize="EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


def empty_cache(blocks: int, layout: RowLayout, gap: int) -> torch.Tensor:
    """A poisoned cache whose blocks lie `gap` rows apart, as among other layers' blocks."""
    width = LATENT if layout is BF16 else layout.row_bytes
    kind = torch.bfloat16 if layout is BF16 else torch.uint8
    whole = torch.full((blocks, BLOCK + gap, width), 7, dtype=kind)
    return whole[:, :BLOCK]


def scene(seed: int, layout: RowLayout, tokens: int, context: int, columns: int, empty: bool):
    random = torch.Generator().manual_seed(seed)
    requests, blocks = 2, -(-context // BLOCK)
    latents = torch.randn(requests, context, LATENT, generator=random).bfloat16()
    cache = empty_cache(requests * blocks + 1, layout, gap=3)
    order = torch.randperm(requests * blocks, generator=random) + 1
    table = order.view(requests, blocks).int()
    stored = kv_rows.write_rows(latents, layout)
    for request in range(requests):
        for position in range(context):
            row = stored[request, position]
            row = row.view(torch.bfloat16) if layout is BF16 else row
            cache[table[request, position // BLOCK], position % BLOCK] = row
    indices = torch.full((tokens, columns), -1, dtype=torch.int32)
    for token in range(tokens):
        count = 0 if empty and token == 0 else min(context, columns - token % 3)
        places = torch.randperm(columns, generator=random)[:count]
        indices[token, places] = torch.randperm(context, generator=random)[:count].int()
    request = torch.randint(0, requests, (tokens,), generator=random).int()
    return random, latents, stored, cache, table, request, indices


def exact(q, values, request, indices):
    kept = (indices >= 0) & (indices < values.shape[1])
    chosen = values[request.long()[:, None], indices.clamp(0, values.shape[1] - 1).long()]
    scores = torch.einsum("thd,twd->thw", q.double(), chosen) * SCALE
    weights = torch.softmax(scores.masked_fill(~kept[:, None], float("-inf")), -1).nan_to_num(0.0)
    return torch.einsum("thw,twd->thd", weights, chosen)


def poisoned(*specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    return [torch.full(shape, float("nan"), dtype=dtype) for shape, dtype in specs]


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-12))


@given(
    st.sampled_from(TILES),
    st.sampled_from(list(LAYOUTS.values())),
    st.integers(0, 1 << 30),
    st.integers(1, 4),
    st.sampled_from([1, 3, 8, 16, 20, 32]),
    st.integers(40, 90),
    st.sampled_from([1, 2, 5]),
    st.booleans(),
)
@QUICK
def attention_is_exact(tile, layout, seed, tokens, heads, context, splits, empty) -> None:
    columns = 80 if tile.kernel == "triton" else 300
    random, latents, stored, cache, table, request, indices = scene(
        seed, layout, tokens, context, columns, empty
    )
    if tokens > 1:
        indices[1, 7] = 10 * context
    q = (torch.randn(tokens, heads, LATENT, generator=random) * 0.35).bfloat16()
    workspace: list[torch.Tensor] = []

    def allocate(*specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        workspace.extend(poisoned(*specs))
        return workspace

    paged = sparse_mla.Paged(cache, table, layout)
    found = sparse_mla.attend(q, paged, request, indices, SCALE, tile, splits, allocate)
    assert bool(workspace) == (splits > 1)
    held = exact(q, kv_rows.read_rows(stored, layout).double(), request, indices)
    assert distance(found, held) <= LIMITS[BF16], distance(found, held)
    true = exact(q, latents.double(), request, indices)
    assert distance(found, true) <= LIMITS[layout], distance(found, true)
    if empty:
        assert not found[0].any()


@given(st.sampled_from(list(LAYOUTS.values())), st.integers(0, 1 << 30), st.integers(1, 40))
@QUICK
def the_writer_gives_the_reference_bytes(layout, seed, tokens) -> None:
    random = torch.Generator().manual_seed(seed)
    latents = torch.randn(tokens, LATENT, generator=random).bfloat16()
    latents[0, :128] = 0
    cache = empty_cache(4, layout, gap=1)
    before = cache.clone()
    slots = torch.randperm(4 * BLOCK, generator=random)[:tokens]
    slots[tokens // 2] = -1
    rows.write(latents, cache, slots, layout)
    wanted = kv_rows.write_rows(latents, layout)
    for slot, row in zip(slots.tolist(), wanted, strict=True):
        if slot >= 0:
            held = cache[slot // BLOCK, slot % BLOCK].contiguous().view(torch.uint8)
            assert torch.equal(held, row)
            before[slot // BLOCK, slot % BLOCK] = cache[slot // BLOCK, slot % BLOCK]
    assert torch.equal(before, cache)


def true_head_sizes() -> None:
    """64 heads, 2,176 columns with the tail at their end, as the model has them."""
    for layout in LAYOUTS.values():
        random, _, stored, cache, table, request, _ = scene(5, layout, 1, 2400, 16, False)
        indices = torch.full((1, 2176), -1, dtype=torch.int32)
        indices[0, :2063] = torch.randperm(2400, generator=random)[:2063].sort().values.int()
        q = (torch.randn(1, 64, LATENT, generator=random) * 0.35).bfloat16()
        tile = Tile(64, 32, 8, 2, native_e4m3=False)
        paged = sparse_mla.Paged(cache, table, layout)

        found = sparse_mla.attend(q, paged, request, indices, SCALE, tile, 8, poisoned)
        wanted = exact(q, kv_rows.read_rows(stored, layout).double(), request, indices)
        assert distance(found, wanted) <= LIMITS[BF16], (layout.name, distance(found, wanted))
        twin = sparse_mqa(
            q,
            kv_rows.read_rows(stored, layout)[request.long()[:, None], indices.clamp_min(0).long()],
            indices >= 0,
            SCALE,
            LATENT,
        )
        assert distance(twin, wanted) <= 1e-5


def fewer_heads_are_the_first_of_sixty_four() -> None:
    """To the bit in SM90's own kernel, whole and split; nothing is written behind their rows."""
    for layout in LAYOUTS.values():
        random, _, _, cache, table, request, indices = scene(11, layout, 2, 90, 300, False)
        q = (torch.randn(2, 64, LATENT, generator=random) * 0.35).bfloat16()
        paged = sparse_mla.Paged(cache, table, layout)
        for splits, heads in ((1, 32), (1, 16), (3, 32), (3, 16)):
            wholes: list[torch.Tensor] = []

            def allocate(*specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
                wholes.extend(poisoned(*(((2 * shape[0], *shape[1:]), t) for shape, t in specs)))  # noqa: B023
                return [whole[: len(whole) // 2] for whole in wholes]  # noqa: B023

            wide, narrow = (
                sparse_mla.attend(
                    queries.contiguous(), paged, request, indices, SCALE, TILES[1], splits, room
                )
                for queries, room in ((q, poisoned), (q[:, :heads], allocate))
            )
            assert torch.equal(narrow, wide[:, :heads]), (layout.name, splits, heads)
            assert bool(wholes) == (splits > 1)
            assert all(whole[len(whole) // 2 :].isnan().all() for whole in wholes)


def all_bytes_decode_and_encode() -> None:
    """Every e4m3 number that is one survives a row, subnormals and both zeros included."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = torch.full((1, LATENT), 448.0)
    values[0, : codes.numel()] = codes.view(torch.float8_e4m3fn).float()
    cache = empty_cache(1, FP8, gap=0)
    rows.write(values.bfloat16(), cache, torch.tensor([0]), FP8)
    assert torch.equal(cache[0, 0, : codes.numel()], codes)
    one_hot = torch.full((1, 16), -1, dtype=torch.int32)
    one_hot[0, 0] = 0
    paged = sparse_mla.Paged(cache, torch.zeros(1, 1, dtype=torch.int32), FP8)
    q = torch.zeros(1, 16, LATENT).bfloat16()
    tile = Tile(16, 16, 4, 2, native_e4m3=False)
    request = torch.zeros(1, dtype=torch.int32)
    found = sparse_mla.attend(q, paged, request, one_hot, SCALE, tile, 1, poisoned)
    assert torch.equal(found[0, 0].float(), values[0])


if __name__ == "__main__":
    main(
        attention_is_exact,
        the_writer_gives_the_reference_bytes,
        true_head_sizes,
        fewer_heads_are_the_first_of_sixty_four,
        all_bytes_decode_and_encode,
    )
