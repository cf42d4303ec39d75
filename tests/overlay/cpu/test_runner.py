"""Bookkeeping of the model runner that no kernel states: tables, states, sampling."""

from __future__ import annotations

import types

import pytest
import torch

from glm_exl3.cpu.runner import rejection, sampling, states, tables
from glm_exl3.format.errors import GlmExl3Error


def staged(shape: tuple[int, ...], writes: list[tuple[int, int, list[int]]]):
    tensor = types.SimpleNamespace(gpu=torch.zeros(shape, dtype=torch.int32))
    contents = [value for _, _, values in writes for value in values]
    ends = torch.tensor([len(values) for _, _, values in writes]).cumsum(0).tolist()
    tensor._staged_write_indices = [row for row, _, _ in writes]
    tensor._staged_write_starts = [start for _, start, _ in writes]
    tensor._staged_write_contents = contents
    tensor._staged_write_cu_lens = ends
    tensor.cleared = False
    tensor.clear_staged_writes = lambda: setattr(tensor, "cleared", True)
    return tensor


def test_staged_rows_are_written_and_forgotten():
    tensor = staged((3, 5), [(2, 1, [7, 8]), (0, 0, [9]), (2, 2, [6])])
    tables.apply_write(tensor)
    assert tensor.gpu.tolist() == [[9, 0, 0, 0, 0], [0] * 5, [0, 7, 6, 0, 0]]
    assert tensor.cleared


def block_tables(window: int = 0):
    table = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
    return types.SimpleNamespace(
        block_tables=[types.SimpleNamespace(gpu=table)],
        input_block_tables=[torch.full((3, 4), 99, dtype=torch.int32)],
        num_blocks=types.SimpleNamespace(np=torch.tensor([[4, 2, 3]]).numpy()),
        slot_mappings=torch.full((1, 8), 99, dtype=torch.int64),
        block_sizes=[4],
        num_kv_cache_groups=1,
        _num_dirty_rows=3,
        _sliding_window_reach=[window],
        _slot_mapping_enabled=[True],
    )


def test_block_rows_follow_the_batch_and_padding_is_zero():
    out = tables.gather_block_tables(block_tables(), torch.tensor([2, 1]), 2)
    assert out[0].tolist() == [[9, 10, 11, 99], [5, 6, 99, 99]]


def test_blocks_below_the_window_are_null():
    own = block_tables(window=4)
    out = tables.gather_block_tables(
        own, torch.tensor([0]), 1, num_computed_tokens=torch.tensor([12, 0, 0])
    )
    assert out[0].tolist() == [[0, 0, 3, 4]]
    assert own.input_block_tables[0][1:].tolist() == [[0] * 4] * 2


def test_slots_are_block_times_size_plus_offset():
    slots = tables.compute_slot_mappings(
        block_tables(), torch.tensor([1, -1]), torch.tensor([0, 3, 5]), torch.arange(2, 7), 6
    )
    assert slots.tolist() == [[22, 23, 24, -1, -1, -1]]


def test_a_conv_state_moves_shifted_and_a_recurrent_one_from_its_column():
    table = torch.tensor([[1, 2, 3, 0]], dtype=torch.int32)
    conv = torch.arange(4 * 5 * 2, dtype=torch.bfloat16).view(4, 5, 2)
    recurrent = torch.arange(4 * 6, dtype=torch.float32).view(4, 6)
    before, kept = conv.clone(), recurrent.clone()
    context = types.SimpleNamespace(
        block_table_ptrs=torch.tensor([table.data_ptr()]), block_table_stride_req=4
    )
    of_conv = states.Layout(conv.data_ptr(), 20, 2, 2, 5, 0, 0, 0)
    of_state = states.Layout(recurrent.data_ptr(), 24, 4, 6, 0, 0, 0, 0)
    states.move_state(context, of_conv, 0, 0, 2, 1)
    states.move_state(context, of_state, 0, 0, 2, 1)
    assert torch.equal(conv[3, :4], before[1, 1:])
    assert torch.equal(conv[:3], before[:3])
    assert torch.equal(recurrent[3], kept[2])


def test_new_blocks_are_cleared():
    memory = torch.ones(4, 8, dtype=torch.int32)
    states.zero_blocks(
        torch.tensor([memory.data_ptr()]), torch.tensor([8]), torch.tensor([6]), torch.tensor([2])
    )
    assert memory[2].tolist() == [0] * 6 + [1, 1]
    assert int(memory[[0, 1, 3]].sum()) == 24


def test_sampling_follows_the_distribution():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20000, 3)
    drawn = sampling.gumbel_sample(
        logits,
        torch.zeros(20000, dtype=torch.int32),
        torch.ones(1),
        torch.tensor([1234]),
        torch.arange(20000),
        apply_temperature=True,
        is_drafting=False,
    )
    shares = torch.bincount(drawn, minlength=3) / 20000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.015, rtol=0)


def test_rejection_sampling_keeps_the_target_distribution():
    count = 1500
    target, draft = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.2, 0.6])
    proposals = torch.multinomial(
        draft, count, replacement=True, generator=torch.Generator().manual_seed(3)
    )
    first = []
    for row in range(count):
        tokens, _ = rejection.rejection_sample(
            target.log().expand(2, 3),
            draft.log()[None, None],
            torch.tensor([0, int(proposals[row])]),
            torch.tensor([0, 2]),
            torch.tensor([row, row + 1]),
            torch.tensor([0]),
            torch.tensor([0, 0]),
            torch.tensor([0, 1]),
            torch.ones(1),
            torch.tensor([row * 7919]),
            1,
        )
        first.append(int(tokens[0, 0]))
    shares = torch.bincount(torch.tensor(first), minlength=3) / count
    torch.testing.assert_close(shares, target, atol=0.05, rtol=0)


def test_other_rejection_methods_are_refused():
    with pytest.raises(GlmExl3Error, match="use_block_verification"):
        rejection.rejection_sample(*[torch.zeros(1)] * 10, 1, use_block_verification=True)


def test_grammar_bits_mask_the_logits():
    logits = torch.zeros(3, 40)
    words = torch.tensor([[0b1010, 1], [-1, -1]], dtype=torch.int32)
    sampling.apply_grammar_bitmask(
        logits, 40, torch.tensor([2, 3]), torch.tensor([0, 1, 3]), words, 2, 40, MASK_STRIDE=2
    )
    allowed = logits[1].isfinite().nonzero()[:, 0].tolist()
    assert allowed == [1, 3, 32]
    assert logits[[0, 2]].isfinite().all()
