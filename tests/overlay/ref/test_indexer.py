"""The indexer against transformers' pooling and plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from glm_exl3.cpu import torchvision
from glm_exl3.ref import indexer

POOL = 16


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def reference():
    torchvision.prepare()
    from transformers import Glm5NextTextConfig
    from transformers.models.glm5_next import modeling_glm5_next as modeling

    config = Glm5NextTextConfig(
        hidden_size=32, q_lora_rank=16, index_n_heads=2, index_head_dim=128, index_topk=64
    )
    module = modeling.Glm5NextTextIndexer(config, 0)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=index) * 0.3)
    return module


def test_pooled_keys_are_those_of_transformers(reference):
    keys, scores = draw(48, 128, seed=1), draw(48, 128, seed=2)
    packed = torch.cat([keys, scores, torch.ones(48, 1)], dim=-1)[None]
    expected, _, _ = reference.get_pooled_states(packed)
    ours = indexer.pool_keys(
        keys.view(3, POOL, 128), scores.view(3, POOL, 128), reference.index_kpool_compress_ape
    )
    torch.testing.assert_close(ours, expected[0], atol=2e-2, rtol=1e-2)


def test_rotation_keeps_products():
    x, y = draw(4, 128, seed=3), draw(4, 128, seed=4)
    rotated = (indexer.rotate(x) * indexer.rotate(y)).sum(-1)
    torch.testing.assert_close(rotated, (x * y).sum(-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(indexer.rotate(indexer.rotate(x)), x, atol=1e-5, rtol=1e-5)


def test_scales_are_powers_of_two_and_cover_the_range():
    values, scale = indexer.quantise(draw(64, 128, seed=5) * 10)
    exponents = torch.log2(scale)
    assert torch.equal(exponents, exponents.round())
    assert float(values.float().abs().max()) <= 448
    recovered = values.float() * scale[:, None]
    torch.testing.assert_close(recovered, draw(64, 128, seed=5) * 10, atol=0.4, rtol=0.07)


def test_cache_pages_hold_keys_then_scales():
    pages = torch.zeros(3, 4, 132, dtype=torch.uint8)
    keys, scales = indexer.quantise(draw(2, 128, seed=6))
    slots = torch.tensor([5, 10])
    indexer.write_pools(pages, slots, keys, scales)
    raw = pages[1].flatten()
    assert torch.equal(raw[128:256], keys[0].view(torch.uint8))
    assert float(raw[4 * 128 + 4 : 4 * 128 + 8].view(torch.float32)) == float(scales[0])
    row = torch.tensor([1, 2, 0])
    read = indexer.read_pools(pages, row, 7)
    torch.testing.assert_close(read[1], keys[0].float() * scales[0])
    torch.testing.assert_close(read[6], keys[1].float() * scales[1])


def test_pages_may_lie_apart():
    storage = torch.zeros(3, 4 * 132 + 64, dtype=torch.uint8)
    pages = storage[:, : 4 * 132].unflatten(1, (4, 132))
    keys, scales = indexer.quantise(draw(1, 128, seed=7))
    indexer.write_pools(pages, torch.tensor([8]), keys, scales)
    assert torch.equal(storage[2, :128], keys[0].view(torch.uint8))
    assert int(storage[:, 4 * 132 :].sum()) == 0


def test_scores_are_the_weighted_sum_of_rectified_products():
    q, weights, keys = draw(3, 2, 128, seed=8), draw(3, 2, seed=9), draw(5, 128, seed=10)
    scores = indexer.score_pools(q, weights, keys)
    for token in range(3):
        for pool in range(5):
            expected = sum(
                float(weights[token, head]) * max(0.0, float(q[token, head] @ keys[pool]))
                for head in range(2)
            )
            assert math.isclose(float(scores[token, pool]), expected, rel_tol=1e-4, abs_tol=1e-4)


def test_selection_keeps_the_best_visible_pools_in_order():
    scores = torch.tensor([[3.0, 9.0, 5.0, 7.0, 100.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    chosen = indexer.select_pools(scores, torch.tensor([4, 1]), 2)
    assert chosen.tolist() == [[1, 3], [0, -1]]
    everything = indexer.select_pools(scores, torch.tensor([4, 1]), 6)
    assert everything.tolist() == [[0, 1, 2, 3, -1, -1], [0, -1, -1, -1, -1, -1]]


def test_expansion_adds_the_incomplete_pool():
    tokens = indexer.expand_pools(torch.tensor([[2, -1], [0, 1]]), torch.tensor([51, 32]), POOL)
    assert tokens.dtype == torch.int32
    first = tokens[0].tolist()
    assert first[:POOL] == list(range(32, 48))
    assert first[POOL : 2 * POOL] == [-1] * POOL
    assert first[2 * POOL :] == [48, 49, 50] + [-1] * 12
    assert tokens[1].tolist() == list(range(32)) + [-1] * 15


@pytest.mark.parametrize("first", [0, 5, 16, 20, 31])
def test_a_pool_is_gathered_from_ring_and_batch(first):
    values = draw(64, 4, seed=11)
    ring = torch.full((32, 4), float("nan"))
    for position in range(max(0, first - 32), first):
        ring[position % 32] = values[position]
    batch = values[first:40]
    complete = torch.tensor([p - first for p in (15, 31) if p >= first])
    starts = complete + first - 15
    pools = indexer.gather_pool(
        batch,
        ring.expand(len(complete), 32, 4),
        complete,
        starts,
        torch.full_like(starts, first),
        POOL,
    )
    for row, start in enumerate(starts.tolist()):
        assert torch.equal(pools[row], values[start : start + POOL])
