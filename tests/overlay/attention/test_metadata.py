"""The Triton indexer's metadata: graphs replay launches on addresses, so these must not move."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from glm_exl3.attention import indexer_op
from glm_exl3.format.errors import GlmExl3Error


def builder(context_parallel: int = 1) -> indexer_op.PoolBuilder:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=context_parallel),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )
    return indexer_op.PoolBuilder(None, [], config, torch.device("cpu"))


class Common(SimpleNamespace):
    """A step; the mapping is written into the buffer that it is given, as vLLM does."""

    def token_to_req_indices(self, buffer: torch.Tensor) -> torch.Tensor:
        counts = self.query_start_loc.diff()
        filled = torch.repeat_interleave(torch.arange(len(counts)), counts).int()
        buffer[: filled.numel()] = filled
        return buffer[: self.num_actual_tokens]


def common(*counts: int) -> Common:
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return Common(
        query_start_loc=starts,
        seq_lens=torch.tensor(counts).int(),
        block_table_tensor=torch.zeros(len(counts), 2, dtype=torch.int32),
        max_seq_len=max(counts),
        num_actual_tokens=sum(counts),
        num_reqs=len(counts),
    )


def test_steps_share_one_address() -> None:
    """K4, third: a mapping that is a temporary goes stale inside a replayed graph."""
    made = builder()
    first = made.build(0, common(3, 1))
    address = first.request.data_ptr()
    second = made.build(0, common(1, 1, 5))
    assert second.request.data_ptr() == address
    assert second.request.tolist() == [0, 1, 2, 2, 2, 2, 2]


def test_the_ring_s_mapping_keeps_its_address_upstream() -> None:
    """The ring's slots come from vLLM's builder: it must own a buffer, too."""
    from vllm.v1.attention.backends.mla.indexer import KpoolTailMetadataBuilder

    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=64))
    spec = SimpleNamespace(block_size=32)
    tail = KpoolTailMetadataBuilder(spec, [], config, torch.device("cpu"))
    assert tail.slot_mapping_buffer.numel() == 64


def test_context_parallel_ranks_are_refused() -> None:
    with pytest.raises(GlmExl3Error, match="decode_context_parallel_size"):
        builder(context_parallel=2)


def test_a_step_without_positions_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """K4, second: dropped positions must not be taken for zeros."""
    context = SimpleNamespace(attn_metadata={})
    monkeypatch.setattr(indexer_op, "get_forward_context", lambda: context)
    op = SimpleNamespace(topk_indices_buffer=torch.zeros(1, 4, dtype=torch.int32))
    with pytest.raises(GlmExl3Error, match="positions"):
        indexer_op.choose_tokens(op, *[torch.zeros(1)] * 5, None)
