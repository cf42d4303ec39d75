"""The indexer's kernels under Triton's interpreter against a history that forgets nothing.

    python interpreted_indexer.py RESULT.json

Requests run through random steps: prefill chunks that begin and end inside pools, single tokens,
and verify steps of which only some drafts are kept. After each step the cached pools must be those
of the kept history. The four defects that stacked up in earlier releases of vLLM (research K4) have
a check each: a dense stride in the seed, dropped positions, a mapping that graphs replay (in
test_metadata.py) and reads behind the block table.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import random as plain_random

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from interpreted_base import main

from glm_exl3.attention import pool_calls
from glm_exl3.attention.pool_calls import Asked, PoolCache, Step
from glm_exl3.ref import indexer

POOL, DIM, PAGE, BUDGET = 16, 128, 4, 64
QUICK = settings(
    max_examples=int(os.environ.get("EXAMPLES", "3")),
    deadline=None,
    derandomize="EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


class World:
    """A cache among other layers' blocks, and every request's kept keys and gates."""

    def __init__(self, seed: int, requests: int, blocks: int, drafts: int) -> None:
        self.plain = plain_random.Random(seed)
        self.random = torch.Generator().manual_seed(seed)
        self.ring = 16 if drafts == 0 else 32
        self.ape = torch.randn(POOL, DIM, generator=self.random)
        whole = torch.full((requests * blocks + 1, PAGE * 132 + 64), 0xAA, dtype=torch.uint8)
        pages = whole.as_strided((whole.shape[0], PAGE, 132), (whole.stride(0), 132, 1))
        rings = torch.full((requests + 1, 2 * self.ring * DIM + 48), float("nan")).bfloat16()
        ring = rings.as_strided(
            (requests + 1, 2, self.ring, DIM), (rings.stride(0), self.ring * DIM, DIM, 1)
        )
        order = torch.randperm(requests * blocks, generator=self.random) + 1
        self.whole, self.rings = whole, rings
        self.cache = PoolCache(pages, order.view(requests, blocks).int(), ring)
        self.cache.check()
        self.ring_block = torch.randperm(requests, generator=self.random) + 1
        self.keys = [torch.zeros(0, DIM).bfloat16() for _ in range(requests)]
        self.gates = [torch.zeros(0, DIM).bfloat16() for _ in range(requests)]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def step(self, counts: list[int], kept: list[int]) -> Step:
        """Run one step of `counts[r]` tokens; of these `kept[r]` stay in the history."""
        parts = [(self.normal(n, DIM).bfloat16(), self.normal(n, DIM).bfloat16()) for n in counts]
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        before = [keys.shape[0] for keys in self.keys]
        positions = torch.cat([torch.arange(b, b + n) for b, n in zip(before, counts, strict=True)])
        request = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
        step = Step(
            keys=torch.cat([part[0] for part in parts]),
            gates=torch.cat([part[1] for part in parts]),
            ape=self.ape,
            positions=positions,
            request=request,
            query_start=torch.tensor(starts, dtype=torch.int32),
            lengths=torch.tensor([b + n for b, n in zip(before, counts, strict=True)]).int(),
            ring_slots=self.ring_block[request.long()] * self.ring + positions % self.ring,
        )
        pool_calls.insert(step, self.cache)
        for row, (keys, gates) in enumerate(parts):
            self.keys[row] = torch.cat([self.keys[row], keys[: kept[row]]])
            self.gates[row] = torch.cat([self.gates[row], gates[: kept[row]]])
        return step

    def pools(self, row: int) -> torch.Tensor:
        count = self.keys[row].shape[0] // POOL
        keys, gates = (
            x[row][: count * POOL].view(count, POOL, DIM) for x in (self.keys, self.gates)
        )
        return indexer.rotate(indexer.pool_keys(keys, gates, self.ape))

    def check_pools(self) -> None:
        """Cached pools equal the history's to within one rounding of e4m3."""
        for row in range(len(self.keys)):
            wanted = self.pools(row)
            found = indexer.read_pools(self.cache.pages, self.cache.table[row], wanted.shape[0])
            away = (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-9)
            assert not (away > 0.05).any(), (row, away)


@given(st.integers(0, 1 << 30), st.sampled_from([0, 7, 15]))
@QUICK
def pools_are_those_of_the_kept_history(seed: int, drafts: int) -> None:
    """Pool boundaries anywhere, rejected drafts that completed a pool included."""
    world = World(seed, requests=3, blocks=3, drafts=drafts)
    for _ in range(6):
        counts, kept = [], []
        for keys in world.keys:
            room = 3 * PAGE * POOL - keys.shape[0]
            verify = keys.shape[0] > 0 and world.plain.random() < 0.6
            count = 1 + drafts if verify else world.plain.randint(1, 40)
            count = max(0, min(count, room))
            counts.append(count)
            kept.append(world.plain.randint(1, count) if verify and count else count)
        world.step(counts, kept)
        world.check_pools()
    between = world.whole[:, PAGE * 132 :]
    assert bool((between == 0xAA).all()), "bytes of other layers were written"
    assert bool(world.rings[:, 2 * world.ring * DIM :].isnan().all())


@given(st.integers(0, 1 << 30), st.integers(1, 8), st.sampled_from([2, 4, 16]))
@QUICK
def choices_are_those_of_the_reference(seed: int, tokens: int, heads: int) -> None:
    """Scores within rounding; chosen sets equal except across near-ties; rows ascend."""
    world = World(seed, requests=2, blocks=3, drafts=7)
    lengths = [world.plain.randint(BUDGET + 20, 180), world.plain.randint(5, 180)]
    world.step(lengths, lengths)
    counts = [tokens, max(1, tokens // 2)]
    step = world.step(counts, counts)
    total = sum(counts)
    values, scales = indexer.quantise(indexer.rotate(world.normal(total, heads, DIM).bfloat16()))
    weights = world.normal(total, heads) * scales
    out = torch.full((total, BUDGET + 32), 99, dtype=torch.int32)
    pool_calls.choose(
        Asked(values, weights),
        step,
        world.cache,
        200,
        BUDGET,
        1 << 14,
        pool_calls.select_with_torch,
        out,
    )
    for token in range(total):
        row, length = int(step.request[token]), int(step.positions[token]) + 1
        seen = length // POOL
        listed = out[token][out[token] >= 0].tolist()
        if length <= BUDGET:
            assert listed == list(range(length))
            continue
        keys = indexer.read_pools(world.cache.pages, world.cache.table[row], seen)
        wanted = indexer.score_pools(values[token : token + 1].float(), weights[token][None], keys)[
            0
        ]
        chosen = {place // POOL for place in listed[: -(length % POOL) or None]}
        assert listed == sorted(listed)
        assert len(chosen) == min(seen, BUDGET // POOL)
        assert listed[: len(chosen) * POOL] == [
            p * POOL + o for p in sorted(chosen) for o in range(POOL)
        ]
        assert listed[len(chosen) * POOL :] == list(range(seen * POOL, length))
        dropped = [float(wanted[p]) for p in range(seen) if p not in chosen]
        worst = min(float(wanted[p]) for p in chosen)
        assert not dropped or max(dropped) <= worst + 1e-4 * float(wanted.abs().max())
        assert bool((out[token, BUDGET + POOL - 1 :] == -1).all())


def queries_round_like_the_reference() -> None:
    x = torch.randn(70, DIM).bfloat16() * torch.logspace(-6, 6, 70)[:, None].bfloat16()
    values, scales = pool_calls.rotate(x)
    wanted, wanted_scales = indexer.quantise(indexer.rotate(x))
    assert torch.equal(scales[:, 0], wanted_scales)
    differing = (values.view(torch.uint8) != wanted.view(torch.uint8)).float().mean()
    assert float(differing) < 1e-3


def the_seed_follows_the_ring_s_strides() -> None:
    """K4, first: a prefill's incomplete pool lands in its own ring among other layers' bytes."""
    world = World(3, requests=2, blocks=2, drafts=7)
    world.step([21, 10], [21, 10])
    for row, count in enumerate((21, 10)):
        ring = world.cache.ring[world.ring_block[row]]
        for position in range(count):
            assert torch.equal(ring[0, position % 32], world.keys[row][position])
            assert torch.equal(ring[1, position % 32], world.gates[row][position])
    world.step([16, 6], [16, 6])
    world.check_pools()


def positions_of_mixed_steps_are_kept() -> None:
    """K4, second: decode and prefill in one step, each token at its own position."""
    world = World(4, requests=3, blocks=3, drafts=7)
    world.step([31, 14, 0], [31, 14, 0])
    for counts, kept in (([8, 8, 37], [1, 3, 37]), ([8, 8, 8], [8, 1, 2]), ([1, 8, 8], [1, 8, 8])):
        world.step(counts, kept)
        world.check_pools()


def nothing_lies_behind_the_block_table() -> None:
    """K4, fourth: positions beyond the table neither read nor write, whatever lies behind it."""
    world = World(5, requests=1, blocks=2, drafts=7)
    wide = torch.cat([world.cache.table, torch.full((1, 1), 10**6, dtype=torch.int32)], 1)
    cache = PoolCache(world.cache.pages, wide[:, :2], world.cache.ring)
    world.cache = cache
    room = 2 * PAGE * POOL
    world.step([room], [room])
    before = world.whole.clone()
    step = world.step([POOL], [0])
    assert torch.equal(before, world.whole)
    values, scales = indexer.quantise(indexer.rotate(world.normal(POOL, 4, DIM).bfloat16()))
    out = torch.empty(POOL, BUDGET + 32, dtype=torch.int32)
    pool_calls.choose(
        Asked(values, scales),
        step,
        cache,
        room + 64,
        BUDGET,
        1 << 20,
        pool_calls.select_with_torch,
        out,
    )
    assert int(out[:, :BUDGET].max()) < room


if __name__ == "__main__":
    main(
        pools_are_those_of_the_kept_history,
        choices_are_those_of_the_reference,
        queries_round_like_the_reference,
        the_seed_follows_the_ring_s_strides,
        positions_of_mixed_steps_are_kept,
        nothing_lies_behind_the_block_table,
    )
