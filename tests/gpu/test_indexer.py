"""The Triton indexer on a GPU against its reference and against vLLM's own kernels."""

from __future__ import annotations

import pytest
import torch

from glm_exl3.attention import pool_calls
from glm_exl3.attention.pool_calls import Asked, PoolCache, Step
from glm_exl3.ref import indexer

POOL, DIM, PAGE, BUDGET, RING = 16, 128, 64, 2048, 32


class World:
    """One request of `context` tokens, written in two uneven chunks, then a verify step of 8."""

    def __init__(self, generator, context: int) -> None:
        self.generator = generator
        blocks = -(-context // (POOL * PAGE)) + 1
        raw = torch.empty(blocks + 1, PAGE * 132 + 64, dtype=torch.uint8, device="cuda")
        pages = raw.as_strided((blocks + 1, PAGE, 132), (raw.stride(0), 132, 1))
        table = (torch.randperm(blocks, device="cuda", generator=generator) + 1).view(1, -1).int()
        ring = torch.empty(3, 2, RING, DIM, dtype=torch.bfloat16, device="cuda")
        self.cache = PoolCache(pages, table, ring)
        self.ape = torch.randn(POOL, DIM, device="cuda", generator=generator)
        self.keys, self.gates = self.normal(context, DIM), self.normal(context, DIM)
        first = context // 2 + 5
        for start, stop in ((0, first), (first, context - 8), (context - 8, context)):
            self.step = self._step(start, stop)
            pool_calls.insert(self.step, self.cache)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=self.generator).bfloat16()

    def _step(self, start: int, stop: int) -> Step:
        positions = torch.arange(start, stop, device="cuda")
        count = stop - start
        return Step(
            keys=self.keys[start:stop],
            gates=self.gates[start:stop],
            ape=self.ape,
            positions=positions,
            request=torch.zeros(count, dtype=torch.int32, device="cuda"),
            query_start=torch.tensor([0, count], dtype=torch.int32, device="cuda"),
            lengths=torch.tensor([stop], dtype=torch.int32, device="cuda"),
            ring_slots=2 * RING + positions % RING,
        )


@pytest.mark.parametrize("context", [50, 3000, 20_000])
def test_pools_are_those_of_the_history(generator, context) -> None:
    world = World(generator, context)
    count = context // POOL
    keys, gates = (x[: count * POOL].view(count, POOL, DIM) for x in (world.keys, world.gates))
    wanted = indexer.rotate(indexer.pool_keys(keys, gates, world.ape))
    found = indexer.read_pools(world.cache.pages, world.cache.table[0], count)
    assert float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max()) <= 0.05


@pytest.mark.parametrize("heads", [16, 32])
def test_choices_are_those_of_the_reference(generator, heads) -> None:
    from glm_exl3.attention.indexer_op import select

    context = 20_000
    world = World(generator, context)
    values, scales = pool_calls.rotate(world.normal(8 * heads, DIM))
    queries = values.view(8, heads, DIM)
    weights = world.normal(8, heads).float() * scales.view(8, heads)
    out = torch.empty(8, 2176, dtype=torch.int32, device="cuda")
    asked = Asked(queries, weights)
    pool_calls.choose(asked, world.step, world.cache, context, BUDGET, 64 << 20, select, out)
    keys = indexer.read_pools(world.cache.pages, world.cache.table[0], context // POOL)
    scores = indexer.score_pools(queries.float(), weights, keys)
    for token in range(8):
        length = int(world.step.positions[token]) + 1
        seen = length // POOL
        chosen = (out[token, :BUDGET:POOL] // POOL).long()
        assert bool((chosen.diff() > 0).all())
        left = torch.ones(seen, dtype=torch.bool, device="cuda")
        left[chosen] = False
        gap = scores[token, :seen][left].max() - scores[token][chosen].min()
        assert float(gap) <= 1e-4 * float(scores[token].abs().max())
        tail = out[token, BUDGET:]
        assert tail[tail >= 0].tolist() == list(range(seen * POOL, length))


def test_bytes_are_those_of_vllm_s_kernels(generator) -> None:
    """vLLM's cast to e4m3 begins at SM89: its rounding and ours agree to the byte."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("vLLM's kernel needs SM89")
    from vllm.models.glm5next.nvidia.ops.kpool_compress import fwht128_quant_fp8

    x = torch.randn(5000, DIM, device="cuda", generator=generator).bfloat16()
    wanted, wanted_scales = fwht128_quant_fp8(x)
    found, scales = pool_calls.rotate(x)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_scores_are_those_of_deep_gemm(generator) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("DeepGEMM's paged scores run on SM90 and later")
    from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits, get_paged_mqa_logits_metadata

    context = 20_480
    world = World(generator, context)
    values, scales = pool_calls.rotate(world.normal(1 * 32, DIM))
    queries = values.view(1, 32, DIM)
    weights = world.normal(1, 32).float().abs() * scales.view(1, 32)
    pools = context // POOL
    lengths = torch.tensor([[pools]], dtype=torch.int32, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    dense = world.cache.pages.contiguous()
    wanted = fp8_fp4_paged_mqa_logits(
        (queries[None], None),
        dense.unsqueeze(-2),
        weights,
        lengths,
        world.cache.table,
        get_paged_mqa_logits_metadata(lengths, PAGE, processors),
        max_model_len=pools,
    )[:, :pools]
    found = torch.empty(1, pools, device="cuda")
    last = torch.tensor([context - 1], device="cuda")
    request = torch.zeros(1, dtype=torch.int32, device="cuda")
    pool_calls.score(queries, weights, last, request, world.cache, found)
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-3
