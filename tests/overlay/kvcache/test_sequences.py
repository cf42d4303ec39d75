"""Random request sequences over vLLM's own cache manager, with a memory that knows what it holds.

No model runs. Every slot of every block remembers for which prefix it was written; each step
checks that all a forward pass would read (all MLA rows, the drafter's window, the KDA state)
belongs to the request's own prefix, and then writes. Requests share prefixes, go on after an
answer, are resent, branch, are aborted, preempted and evicted; the cache is reset now and then.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from glm_exl3.kvcache.window import FineSlidingWindowManager, FineSlidingWindowSpec

BLOCK, UNIT, WINDOW = 64, 16, 100
MLA, KDA, SWA = range(3)


def groups() -> list[Any]:
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        KVCacheGroupSpec,
        MambaSpec,
        MLAAttentionSpec,
    )

    bf16 = torch.bfloat16
    specs = [
        MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=512, dtype=bf16),
        MambaSpec(
            block_size=BLOCK, shapes=((64,),), dtypes=(torch.float32,), mamba_cache_mode="align"
        ),
        FineSlidingWindowSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=bf16, sliding_window=WINDOW
        ),
        CircularBufferSpec(
            block_size=UNIT, num_kv_heads=2, head_size=64, head_size_v=0, dtype=bf16,
            dcp_sharded=False,
        ),
    ]  # fmt: skip
    return [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]


def make_manager(blocks: int) -> Any:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups(),
        prefix_cache_retention_interval=0,
    )
    return KVCacheManager(
        config,
        max_model_len=4096,
        scheduler_block_size=BLOCK,
        hash_block_size=UNIT,
        max_in_flight_tokens=BLOCK,
        enable_caching=True,
    )


@dataclass
class Running:
    """A request and the prefix hashes of its tokens."""

    request: Any
    answer: int
    hit: int = 0
    hashes: list[int] = field(default_factory=lambda: [0])

    def prefixes(self, count: int) -> list[int]:
        """For each of the first `count` positions, a hash of the tokens up to it."""
        tokens = self.request.all_token_ids
        for position in range(len(self.hashes) - 1, count):
            self.hashes.append(hash((self.hashes[-1], tokens[position])))
        return self.hashes[1:]


@dataclass
class Memory:
    """What each slot of each block was written for: `[block][slot]`; KDA has the slot -1."""

    slots: dict[int, dict[tuple[int, int], int]] = field(default_factory=lambda: defaultdict(dict))

    def copy(self, source: int, target: int) -> None:
        self.slots[target] = dict(self.slots[source])

    def forward(self, one: Running, ids: Any, begin: int, end: int) -> None:
        """Check what positions `begin` to `end - 1` read, then write them."""
        rows = one.prefixes(end)
        for group, first in ((MLA, 0), (SWA, max(0, begin - WINDOW + 1))):
            for position in range(first, begin):
                block = ids[group][position // BLOCK]
                found = self.slots[block].get((group, position % BLOCK))
                assert block and found == rows[position], (group, position, begin)
        if begin:
            block = ids[KDA][(begin - 1) // BLOCK]
            assert block
            assert self.slots[block].get((KDA, -1)) == rows[begin - 1], ("state", begin)
        for group in (MLA, SWA):
            for position in range(begin, end):
                block = ids[group][position // BLOCK]
                assert block or group == SWA
                self.slots[block][group, position % BLOCK] = rows[position]
        self.slots[ids[KDA][(end - 1) // BLOCK]][KDA, -1] = rows[end - 1]


class Scheduler:
    """The part of vLLM's scheduler that the cache needs: chunks, copies, preemption."""

    def __init__(self, generator: random.Random, blocks: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(UNIT, sha256)
        self.generator = generator
        self.manager = make_manager(blocks)
        self.memory = Memory()
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.number = 0
        self.seen: dict[str, int] = defaultdict(int)
        self.chats: list[list[int]] = []

    def add(self, prompt: list[int], answer: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.number += 1
        request = Request(
            f"request {self.number}", prompt, SamplingParams(max_tokens=answer), None,
            block_hasher=self.hasher,
        )  # fmt: skip
        self.waiting.append(Running(request, answer))

    def step(self) -> None:
        self.manager.new_step_starts()
        planned = [(one, n) for one in list(self.running) if (n := self._grow(one))]
        while self.waiting and len(self.running) < 4:
            n = self._admit(self.waiting[0])
            if not n:
                break
            one = self.waiting.pop(0)
            self.running.append(one)
            planned.append((one, n))
        copies, retained = self.manager.take_kv_cache_block_copies()
        for copy in copies:
            self.memory.copy(copy.src_block_id, copy.dst_block_id)
        for one, count in planned:
            if one in self.running:
                self._run(one, count)
        self.manager.block_pool.free_blocks(retained)

    def _run(self, one: Running, count: int) -> None:
        request = one.request
        begin = request.num_computed_tokens
        ids = self.manager.get_block_ids(request.request_id)
        self.memory.forward(one, ids, begin, begin + count)
        request.num_computed_tokens = begin + count
        if request.num_computed_tokens < request.num_tokens:
            return
        if request.num_output_tokens == one.answer:
            self.running.remove(one)
            self.manager.free(request)
            self.chats.append(list(request.all_token_ids))
            self.seen["answered"] += 1
            return
        request.append_output_token_ids(self.generator.randrange(9))

    def _chunk(self, request: Any, start: int) -> int:
        """Tokens of the next chunk: it ends where vLLM would have it end."""
        left = request.num_tokens - start
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prefill_end:
            return left
        end = min(start + left, start + self.generator.choice((1, 2, 3)) * BLOCK)
        if end < prefill_end:
            end = end // BLOCK * BLOCK
        last = max(0, request.num_tokens - 1) // BLOCK * BLOCK
        tail = (request.num_prompt_tokens - 1) // UNIT * UNIT
        stops = [last, tail if last < tail else 0]
        if start % BLOCK:
            stops.append((start // BLOCK + 1) * BLOCK)
        end = min([stop for stop in stops if start < stop < end], default=end)
        return end - start

    def _grow(self, one: Running) -> int:
        if one not in self.running:
            return 0
        request = one.request
        count = self._chunk(request, request.num_computed_tokens)
        while self.manager.allocate_slots(request, count) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is one:
                return 0
        return count

    def _preempt(self, one: Running) -> None:
        self.running.remove(one)
        self.manager.free(one.request)
        one.request.num_computed_tokens = 0
        self.waiting.insert(0, one)
        self.seen["preempted"] += 1

    def _admit(self, one: Running) -> int:
        request = one.request
        blocks, hit, junction = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = junction
        count = self._chunk(request, hit)
        made = self.manager.allocate_slots(
            request, count, num_new_computed_tokens=hit, new_computed_blocks=blocks,
            full_sequence_must_fit=True,
        )  # fmt: skip
        if made is None:
            return 0
        request.num_computed_tokens = one.hit = hit
        self.seen["hits"] += hit > 0
        self.seen["inside a block"] += hit % BLOCK != 0
        self.seen["reused"] += hit
        return count

    def abort(self) -> None:
        pool = self.running or self.waiting
        if not pool:
            return
        one = self.generator.choice(pool)
        pool.remove(one)
        self.manager.free(one.request)
        self.seen["aborted"] += 1


def drive(seed: int, sequences: int, blocks: int) -> dict[str, int]:
    generator = random.Random(seed)
    scheduler = Scheduler(generator, blocks)
    documents = [[generator.randrange(9) for _ in range(300)] for _ in range(4)]
    for _ in range(sequences):
        for _ in range(generator.randint(1, 4)):
            scheduler.add(_prompt(generator, documents, scheduler.chats), generator.randint(1, 30))
        for _ in range(generator.randint(1, 60)):
            scheduler.step()
            if generator.random() < 0.01:
                scheduler.abort()
        if generator.random() < 0.1:
            while scheduler.running or scheduler.waiting:
                scheduler.abort()
            scheduler.seen["resets"] += scheduler.manager.reset_prefix_cache()
        del scheduler.chats[:-6]
    while scheduler.running or scheduler.waiting:
        scheduler.step()
    free = scheduler.manager.block_pool.get_num_free_blocks()
    assert free == blocks - 1, "blocks were lost"
    return scheduler.seen


def _prompt(generator: random.Random, documents: Any, chats: Any) -> list[int]:
    kind = generator.choice(("document", "turn", "again", "branch") if chats else ("document",))
    source = generator.choice(documents if kind == "document" else chats)
    cut = len(source) if kind in {"turn", "again"} else generator.randint(1, len(source))
    new = 0 if kind == "again" else generator.randint(1, 40)
    return [*source[:cut], *(generator.randrange(9) for _ in range(new))][:400]


@pytest.mark.parametrize("blocks", [40, 120])
def test_every_read_finds_what_was_written_for_its_prefix(blocks: int) -> None:
    seen = drive(seed=blocks, sequences=200, blocks=blocks)
    for kind in ("answered", "hits", "inside a block", "aborted", "resets"):
        assert seen[kind], kind
    if blocks == 40:
        assert seen["preempted"]


def test_the_memory_would_notice_a_window_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check itself: a manager that forgets the window must be caught."""
    honest = FineSlidingWindowManager.find_longest_cache_hit.__func__

    def careless(cls: Any, *arguments: Any, **named: Any) -> Any:
        blocks, length = honest(cls, *arguments, **named)
        null = named["block_pool"].null_block
        return tuple([null] * len(group) for group in blocks), length

    monkeypatch.setattr(FineSlidingWindowManager, "find_longest_cache_hit", classmethod(careless))
    with pytest.raises(AssertionError):
        drive(seed=1, sequences=60, blocks=120)
