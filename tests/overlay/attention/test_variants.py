"""What a run over the variants of the attention kernel plans and prints, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm_exl3.attention import tiles
from glm_exl3.format.kv import BF16, FP8, LATENT, LAYOUTS
from kv import variants
from kv.measure import BLOCK, SCALE, Shape


def test_every_call_has_the_plain_tile_first_and_sm90_s_own_kernel() -> None:
    calls = list(variants.trials())
    tokens = sorted(c[0].shape.tokens for c in calls if c[0].layout is BF16)
    assert tokens == [1, 4, 8, 16, 32, 64, 128, 512, 2048]
    for call in calls:
        shape, layout = call[0].shape, call[0].layout
        asked = (90, variants.HEADS, layout, shape.tokens)
        assert call[0].tile == tiles.tile_for(*asked, gluon=False)
        assert {tiles.HOPPER, tiles.tile_for(*asked)} <= {trial.tile for trial in call}
        assert len({trial.tile for trial in call}) == len(call)


@pytest.mark.parametrize("heads", [32, 16])
def test_calls_of_fewer_heads_have_every_tile_that_a_launch_could_take(heads: int) -> None:
    calls = list(variants.trials((heads,)))
    assert len(calls) == len(variants.CALLS) + 2 * len(variants.FEW_CALLS)
    for call in calls:
        shape, layout = call[0].shape, call[0].layout
        asked = (90, heads, layout, shape.tokens)
        assert shape.heads == heads
        assert call[0].tile == tiles.tile_for(*asked, gluon=False)
        wanted = {tiles.HOPPER, tiles.ONE, tiles.tile_for(*asked)}
        assert wanted <= {trial.tile for trial in call}


def test_calls_of_several_heads_keep_a_layout_together() -> None:
    calls = [(c[0].layout.name, c[0].shape.heads) for c in variants.trials((32, 16))]
    assert list(dict.fromkeys(calls)) == [(n, h) for n in LAYOUTS for h in (32, 16)]
    places = [variants.place(trial) for call in variants.trials((64, 32, 16)) for trial in call]
    assert len(set(places)) == len(places)


def test_a_kernel_is_compiled_once() -> None:
    every = [trial for call in variants.trials() for trial in call]
    own = {variants.built(t) for t in every if t.tile.kernel != "triton"}
    assert len(own) == 3 * 2  # layouts, with and without splits
    assert len({variants.built(t) for t in every}) < len(every)


class Held:
    """The parts of a scene that the reference reads: two blocks in swapped order."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.shape, self.layout = Shape("decode", 1, 2, 2 * BLOCK, 3), BF16
        latents = torch.randn(2, BLOCK, LATENT, generator=random)
        self.caches = [latents.bfloat16()]
        self.table = torch.tensor([[1, 0]])
        self.request = torch.zeros(2, dtype=torch.int32)
        self.indices = torch.tensor([[3, -1, BLOCK + 5], [-1, -1, -1]], dtype=torch.int32)
        self.q = torch.randn(2, 3, LATENT, generator=random).bfloat16()


def test_the_reference_reads_the_named_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    linspace = torch.linspace
    monkeypatch.setattr(torch, "linspace", lambda *a, device: linspace(*a))
    scene: Any = Held()
    some, exact = variants.reference(scene)
    assert some.tolist() == [0, 1]
    values = torch.stack([scene.caches[0][1, 3], scene.caches[0][0, 5]]).double()
    weights = torch.softmax(scene.q[0].double() @ values.T * SCALE, -1)
    assert torch.equal(exact[0], weights @ values)
    assert not exact[1].any()


def test_the_table_marks_what_is_wrong() -> None:
    base = {"op": "variant", "layout": FP8.name, "heads": 32, "requests": 16, "each": 8}
    found = [
        {**base, "name": "plain", "us": 762.04, "wrong": False},
        {**base, "name": "hopper", "us": 1.0, "wrong": True},
        {**base, "name": "16x32", "error": "no"},
        {"op": "edges", "layout": FP8.name, "name": "hopper", "wrong": False},
    ]
    head, _, row = variants.table(found).splitlines()
    assert head == "| call | plain | hopper | 16x32 |"
    assert row == "| fp8 32 heads 16x8 | 762.0 | 1.0! | error |"
