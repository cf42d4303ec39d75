"""Sparse attention on a GPU: float64 references, poisoned memory, graphs, vLLM's own kernels."""

from __future__ import annotations

import pytest
import torch

from glm_exl3.attention import rows, sparse_mla, tiles
from glm_exl3.format.kv import BF16, FP8, INT8, LATENT, LAYOUTS, RowLayout
from glm_exl3.ref import kv_rows

SCALE, BLOCK, WIDTH, CHOSEN = 256**-0.5, 64, 2176, 2063
LIMITS = {BF16: 4e-3, FP8: 3e-2, INT8: 1.5e-2}
FEWER = ((1, 32), (3, 32), (32, 16), (128, 16))
"""SM90 takes the plain kernel for the first and third, its own for the others."""
LAYOUT = pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=list(LAYOUTS))


def device() -> tuple[int, int]:
    found = torch.cuda.get_device_properties(0)
    return found.major * 10 + found.minor, found.multi_processor_count


def allocate(*specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in specs]


class Scene:
    def __init__(self, generator, layout: RowLayout, tokens: int, heads: int, context: int) -> None:
        self.layout, self.generator = layout, generator
        blocks = -(-context // BLOCK)
        self.latents = self.normal(2, blocks * BLOCK, LATENT)
        width = LATENT if layout is BF16 else layout.row_bytes
        kind = torch.bfloat16 if layout is BF16 else torch.uint8
        whole = torch.empty(2 * blocks + 1, BLOCK + 16, width, dtype=kind, device="cuda")
        self.cache = whole[:, :BLOCK]
        order = torch.randperm(2 * blocks, device="cuda", generator=generator) + 1
        self.table = order.view(2, blocks).int()
        slots = self.table.long()[:, :, None] * BLOCK + torch.arange(BLOCK, device="cuda")
        rows.write(self.latents.flatten(0, 1), self.cache, slots.flatten(), layout)
        self.request = torch.randint(0, 2, (tokens,), device="cuda", generator=generator).int()
        noise = torch.rand(tokens, context, device="cuda", generator=generator)
        chosen = noise.topk(min(context, CHOSEN), dim=1).indices.int()
        self.indices = torch.full((tokens, WIDTH), -1, dtype=torch.int32, device="cuda")
        self.indices[:, : chosen.shape[1]] = chosen
        self.q = self.normal(tokens, heads, LATENT) * 0.35

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=self.generator).bfloat16()

    def attend(
        self, splits: int | None = None, tile: tiles.Tile | None = None, room=allocate
    ) -> torch.Tensor:
        tokens, heads, _ = self.q.shape
        architecture, processors = device()
        tile = tile or sparse_mla.launch_tile(architecture, heads, self.layout, tokens)
        wanted = splits or tiles.splits_for(tokens, heads, tile, processors)
        paged = sparse_mla.Paged(self.cache, self.table, self.layout)
        return sparse_mla.attend(
            self.q, paged, self.request, self.indices, SCALE, tile, wanted, room
        )

    def exact(self, values: torch.Tensor) -> torch.Tensor:
        out = []
        for token in range(self.q.shape[0]):
            ids = self.indices[token]
            chosen = values[self.request[token].long(), ids[ids >= 0].long()].double()
            scores = self.q[token].double() @ chosen.T * SCALE
            out.append(torch.softmax(scores, -1) @ chosen)
        return torch.stack(out)

    def held(self) -> torch.Tensor:
        return kv_rows.read_rows(kv_rows.write_rows(self.latents, self.layout), self.layout)


def away(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@LAYOUT
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (8, 64), *FEWER, (5, 8)])
@pytest.mark.parametrize("context", [300, 5000])
def test_attention_is_exact(generator, layout, tokens, heads, context) -> None:
    scene = Scene(generator, layout, tokens, heads, context)
    found = scene.attend()
    assert away(found, scene.exact(scene.held())) <= LIMITS[BF16]
    assert away(found, scene.exact(scene.latents)) <= LIMITS[layout]


@LAYOUT
def test_the_writer_gives_the_reference_bytes(generator, layout) -> None:
    scene = Scene(generator, layout, 1, 16, 1000)
    stored = kv_rows.write_rows(scene.latents, layout)
    held = scene.cache[scene.table.long()].contiguous().view(torch.uint8)
    assert torch.equal(held.view(stored.shape), stored)


@LAYOUT
def test_absent_and_foreign_indices_add_nothing(generator, layout) -> None:
    scene = Scene(generator, layout, 3, 64, 4000)
    scene.indices[0] = -1
    scene.indices[1, 5::7] = -1
    wanted = scene.exact(scene.held())
    scene.indices[1, 5::7] = 1 << 20
    found = scene.attend()
    assert not found[0].any()
    assert away(found[1:], wanted[1:]) <= LIMITS[BF16]


@LAYOUT
def test_splits_change_rounding_only(generator, layout) -> None:
    scene = Scene(generator, layout, 2, 64, 4000)
    whole = scene.attend(splits=1).double()
    for splits in (2, 8, 64):
        assert away(scene.attend(splits=splits), whole) <= LIMITS[BF16]


def replayed(scene: Scene, tile: tiles.Tile | None = None) -> torch.Tensor:
    """The result of a graph whose queries and indices change behind its capture."""
    scene.attend(tile=tile)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = scene.attend(tile=tile)
    scene.q.copy_(scene.normal(*scene.q.shape) * 0.35)
    scene.indices[:, 100:] = -1
    graph.replay()
    return found


@LAYOUT
def test_a_graph_replays_new_contents(generator, layout) -> None:
    scene = Scene(generator, layout, 8, 64, 4000)
    found = replayed(scene)
    assert away(found, scene.exact(scene.held())) <= LIMITS[BF16]


@pytest.fixture
def own() -> tiles.Tile:
    """SM90's own kernel; most of what is above takes it, too, but for one token of bf16."""
    if device()[0] != 90:
        pytest.skip("the kernel in Gluon runs on SM90 only")
    assert sparse_mla.hopper_module() is not None
    return tiles.HOPPER


TOKENS = pytest.mark.parametrize("tokens", [1, 8, 66, 67, 300])
"""Decode, verify, the last number of tokens in two ranges of keys, and prefill in one."""


@pytest.mark.parametrize(("heads", "plain"), [(64, 1), (32, 1), (16, 32)])
def test_sm90_s_own_kernel_is_launched_but_for_few_tokens_of_bf16(own, heads, plain) -> None:
    for layout in LAYOUTS.values():
        for tokens in (1, 2, 32, 33, 300):
            found = sparse_mla.launch_tile(90, heads, layout, tokens)
            assert (found == own) == (layout is not BF16 or tokens > plain)


@LAYOUT
@TOKENS
@pytest.mark.parametrize("context", [40, 5000])
def test_sm90_s_own_kernel_is_exact(generator, own, layout, tokens, context) -> None:
    """One token has all its keys, the first of several none, the second gaps and foreign ones."""
    scene = Scene(generator, layout, tokens, 64, context)
    if tokens > 1:
        scene.indices[0] = -1
        scene.indices[1, 5::7] = -1
    wanted = scene.exact(scene.held())
    if tokens > 1:
        scene.indices[1, 5::7] = 1 << 20
    found = scene.attend(tile=own)
    assert tokens == 1 or not found[0].any()
    assert away(found, wanted) <= LIMITS[BF16]


@LAYOUT
@pytest.mark.parametrize("heads", [32, 16])
@pytest.mark.parametrize("splits", [1, 2, 64])
def test_sm90_s_own_kernel_masks_missing_heads(generator, own, layout, heads, splits) -> None:
    """Whole and split; behind the rows of the heads that exist the workspaces stay as they were."""
    scene = Scene(generator, layout, 3, heads, 5000)
    scene.indices[0] = -1
    scene.indices[1, 5::7] = -1
    wanted, wholes = scene.exact(scene.held()), []

    def guarded(*specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        for shape, dtype in specs:
            whole = torch.full((2 * shape[0], *shape[1:]), torch.nan, dtype=dtype, device="cuda")
            wholes.append(whole)
        return [whole[: len(whole) // 2] for whole in wholes]

    found = scene.attend(splits, own, guarded)
    assert not found[0].any()
    assert away(found, wanted) <= LIMITS[BF16]
    assert bool(wholes) == (splits > 1)
    assert all(whole[len(whole) // 2 :].isnan().all() for whole in wholes)


@LAYOUT
@pytest.mark.parametrize("heads", [32, 16])
@pytest.mark.parametrize("tokens", [8, 300])
def test_sm90_s_own_kernel_replays_fewer_heads(generator, own, layout, heads, tokens) -> None:
    scene = Scene(generator, layout, tokens, heads, 4000)
    found = replayed(scene, own)
    assert away(found, scene.exact(scene.held())) <= LIMITS[BF16]


@LAYOUT
def test_the_plain_kernel_agrees_with_sm90_s_own(generator, own, layout) -> None:
    scene = Scene(generator, layout, 8, 64, 5000)
    plain = tiles.tile_for(90, 64, layout, 8, gluon=False)
    found = scene.attend(tile=plain)
    assert away(found, scene.exact(scene.held())) <= LIMITS[BF16]
    assert away(scene.attend(tile=own), found.double()) <= LIMITS[BF16]


@LAYOUT
@TOKENS
def test_sm90_s_own_kernel_replays_new_contents(generator, own, layout, tokens) -> None:
    scene = Scene(generator, layout, tokens, 64, 4000)
    found = replayed(scene, own)
    assert away(found, scene.exact(scene.held())) <= LIMITS[BF16]


@LAYOUT
@pytest.mark.parametrize("splits", [1, 2, 64])
def test_sm90_s_own_kernel_without_any_key_gives_zeros(generator, own, layout, splits) -> None:
    scene = Scene(generator, layout, 3, 64, 300)
    scene.indices[:] = -1
    assert not scene.attend(splits, own).any()
    assert not replayed(scene, own).any()


def test_vllm_s_flash_attention_agrees(generator) -> None:
    if device()[0] != 90:
        pytest.skip("vLLM's sparse FlashAttention 3 runs on SM90 only")
    from kv.measure import Scene as Timed
    from kv.measure import Shape, flash_attention

    timed = Timed(Shape("decode", 2, 3, 8192, 64), BF16)
    theirs = flash_attention(timed)(timed.caches[0])
    assert away(timed.ours(timed.caches[0]), theirs.double()) <= LIMITS[BF16]
