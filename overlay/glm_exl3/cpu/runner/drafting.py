"""Kernels of the DFlash2 and MTP speculators.

Each function replaces the vLLM kernel or function named in its docstring. Launch arguments keep
vLLM's names and order; sizes of blocks are ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glm_exl3.cpu.runner.sampling import gumbel_argmax

PAD_SLOT = -1


def prepare_dflash_inputs(  # noqa: PLR0913, PLR0917 - vLLM's signature
    input_buffers: Any,
    query_slot_mapping: Tensor,
    context_positions: Tensor,
    context_slot_mapping: Tensor,
    sample_indices: Tensor,
    sample_pos: Tensor,
    sample_idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    input_batch: Any,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    input_temperature: Tensor,
    input_seeds: Tensor,
    block_table: Tensor,
    block_size: int,
    cp_rank: int,
    cp_size: int,
    cp_interleave: int,
    parallel_drafting_token_id: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    sample_from_anchor: bool = False,
    num_reqs_override: int | None = None,
) -> None:
    """`dflash.speculator.prepare_dflash_inputs`: context rows, query block and sample rows.

    Context: the step's accepted tokens. Queries: the sampled token, then mask tokens.
    """
    count = input_batch.num_reqs if num_reqs_override is None else num_reqs_override
    per, steps, skip = num_query_per_req, num_speculative_steps, int(not sample_from_anchor)
    starts = input_batch.query_start_loc.tolist()
    sampled, rejected = num_sampled.tolist(), num_rejected.tolist()
    for row, request in enumerate(input_batch.idx_mapping[:count].tolist()):
        begin, end = starts[row], starts[row + 1]
        context = input_batch.positions[begin : end - rejected[row]].long()
        slots = _slots(block_table[row], context, block_size)
        _fill(context_positions[begin:end], context, 0)
        _fill(context_slot_mapping[begin:end], slots, PAD_SLOT)
        places = int(context[-1]) + 1 + torch.arange(per)
        source = last_sampled if sampled[row] > 0 else next_prefill_tokens
        tokens = (int(source.view(-1)[request]), parallel_drafting_token_id)
        _place_queries(input_buffers, row, places, tokens, max_model_len)
        slots = _slots(block_table[row], places, block_size)
        query_slot_mapping[row * per : (row + 1) * per] = slots
        samples = slice(row * steps, row * steps + per - skip)
        sample_indices[samples] = row * per + torch.arange(skip, per)
        sample_pos[samples] = places[skip:] + (1 - skip)
        sample_idx_mapping[samples] = request
        temperature[request] = input_temperature[request]
        seeds[request] = input_seeds[request]
    for target, value in ((sample_indices, 0), (sample_pos, 0), (sample_idx_mapping, -1)):
        target[count * steps : max_num_reqs * steps] = value
    _pad_queries(input_buffers, query_slot_mapping, count, per, max_num_reqs, max_num_tokens)


def _fill(target: Tensor, values: Tensor, padding: int) -> None:
    target[: values.shape[0]] = values
    target[values.shape[0] :] = padding


def _place_queries(
    buffers: Any, row: int, places: Tensor, tokens: tuple[int, int], max_model_len: int
) -> None:
    per = places.shape[0]
    queries = slice(row * per, (row + 1) * per)
    buffers.input_ids[row * per], buffers.input_ids[row * per + 1 : queries.stop] = tokens
    buffers.is_padding[queries] = False
    buffers.positions[queries] = places.clamp_max(max_model_len - 1)
    buffers.query_start_loc[row] = row * per
    buffers.seq_lens[row] = min(int(places[-1]) + 1, max_model_len)


def _pad_queries(  # noqa: PLR0913, PLR0917 - sizes of the buffers
    buffers: Any, slots: Tensor, count: int, per: int, max_num_reqs: int, max_num_tokens: int
) -> None:
    buffers.query_start_loc[count : max_num_reqs + 1] = count * per
    buffers.seq_lens[count:max_num_reqs] = 0
    rest = slice(count * per, max_num_tokens)
    buffers.input_ids[rest] = 0
    buffers.positions[rest] = 0
    buffers.is_padding[rest] = True
    slots[rest] = PAD_SLOT


def _slots(block_row: Tensor, places: Tensor, block: int) -> Tensor:
    """Cache slots of positions; a slot in the null block is no slot."""
    blocks = block_row[(places // block).clamp_max(block_row.shape[0] - 1)].long()
    return torch.where(blocks != 0, blocks * block + places % block, PAD_SLOT)


def walk_candidates(  # noqa: PLR0913, PLR0917 - vLLM's signature
    self: Any,
    candidate_ids: Tensor,
    scores: Tensor,
    num_reqs: int,
    sample_pos: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    use_fp64: bool,
) -> None:
    """`CandidateSampler.sample`: per step, choose among K candidates given the one before.

    candidate_ids `[R, k, K]`, scores `[R, k, K, K]` (previous choice, next choice).
    """
    steps, width = self.num_steps, self.top_k
    ids = candidate_ids.reshape(num_reqs, steps, width)
    table = scores.reshape(num_reqs, steps, width, width).float()
    requests = idx_mapping.reshape(-1)[: num_reqs * steps].view(num_reqs, steps)[:, 0].long()
    valid = requests >= 0
    safe = requests.clamp_min(0)
    rows = torch.arange(num_reqs)
    heat = torch.where(valid, temperature[safe].float(), 0.0)
    if draft_logits is None:
        heat = torch.zeros_like(heat)
    places = sample_pos.reshape(-1)[: num_reqs * steps].view(num_reqs, steps).long() - 1
    flat = draft_tokens.view(-1)
    choice = torch.zeros(num_reqs, dtype=torch.int64)
    for step in range(steps):
        realised = table[rows, step, choice]
        self.scores[:num_reqs, step] = realised
        choice = gumbel_argmax(
            realised,
            ids[:, step].long(),
            seeds[safe].long() ^ (step << 32),
            places[:, step],
            heat,
            drafting=True,
            scale=True,
            double=use_fp64,
        )
        flat[rows * steps + step] = ids[rows, step, choice].to(flat.dtype)
    if draft_logits is None:
        return
    kept = requests[valid]
    old = self.cached_candidate_ids[kept]
    logits = draft_logits[kept, :steps]
    logits.scatter_(2, old, float("-inf"))
    logits.scatter_(2, ids[valid].long(), self.scores[:num_reqs][valid].to(logits.dtype))
    draft_logits[kept, :steps] = logits
    self.cached_candidate_ids[kept] = ids[valid].to(self.cached_candidate_ids.dtype)


def prepare_prefill_inputs(  # noqa: PLR0913, PLR0917 - vLLM's signature
    last_token_indices: Tensor,
    current_draft_step: Tensor,
    input_buffers: Any,
    input_batch: Any,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    max_num_reqs: int,
) -> Tensor:
    """`target_dependent_ar.speculator.prepare_prefill_inputs`: the step's tokens shifted by one."""
    count = input_batch.num_reqs
    starts = input_batch.query_start_loc.tolist()
    sampled, rejected = num_sampled.tolist(), num_rejected.tolist()
    following = next_prefill_tokens.view(-1)
    for row, request in enumerate(input_batch.idx_mapping[:count].tolist()):
        begin, end = starts[row], starts[row + 1] - rejected[row]
        token = last_sampled.view(-1)[request] if sampled[row] > 0 else following[request]
        input_buffers.input_ids[begin : end - 1] = input_batch.input_ids[begin + 1 : end]
        input_buffers.input_ids[end - 1] = token.to(input_buffers.input_ids.dtype)
        last_token_indices[row] = end - 1
        input_buffers.positions[begin:end] = input_batch.positions[begin:end]
    input_buffers.query_start_loc[:count] = input_batch.query_start_loc[:count]
    input_buffers.query_start_loc[count : max_num_reqs + 1] = starts[count]
    input_buffers.seq_lens[:count] = input_batch.seq_lens[:count]
    input_buffers.seq_lens[count:max_num_reqs] = 0
    last_token_indices[count:max_num_reqs] = 0
    current_draft_step.zero_()
    return last_token_indices


def prepare_decode_inputs(  # noqa: PLR0913, PLR0917 - vLLM's signature
    draft_tokens: Tensor,
    target_seq_lens: Tensor,
    num_rejected: Tensor,
    input_buffers: Any,
    sample_src_positions: Tensor,
    max_model_len: int,
    max_num_reqs: int,
    advance_draft_positions: bool = True,
) -> None:
    """`target_dependent_ar.speculator.prepare_decode_inputs`: one token per request."""
    count = draft_tokens.shape[0]
    first = draft_tokens if draft_tokens.ndim == 1 else draft_tokens[:, 0]
    input_buffers.input_ids[:count] = first.to(input_buffers.input_ids.dtype)
    sample_src_positions[:count] += 1
    lengths = target_seq_lens[:count] - num_rejected[:count]
    if advance_draft_positions:
        input_buffers.positions[:count] = (input_buffers.positions[:count] + 1).clamp_max(
            max_model_len - 1
        )
        lengths = (lengths + 1).clamp_max(max_model_len)
    input_buffers.seq_lens[:count] = lengths
    input_buffers.seq_lens[count:max_num_reqs] = 0
    ends = torch.arange(max_num_reqs + 1, dtype=input_buffers.query_start_loc.dtype)
    input_buffers.query_start_loc[: max_num_reqs + 1] = ends.clamp_max(count)


def update_draft_inputs(  # noqa: PLR0913, PLR0917 - vLLM's signature
    draft_tokens: Tensor,
    current_draft_step: Tensor,
    hidden_states: Tensor,
    output_draft_tokens: Tensor,
    next_input_hidden_states: Tensor,
    input_buffers: Any,
    sample_src_positions: Tensor,
    num_reqs: int,
    max_model_len: int,
    num_speculative_steps: int,
    advance_draft_positions: bool = True,
) -> None:
    """`target_dependent_ar.speculator.update_draft_inputs`: record a draft, prepare the next."""
    step = int(current_draft_step)
    output_draft_tokens[:num_reqs, step] = draft_tokens[:num_reqs].to(output_draft_tokens.dtype)
    if step >= num_speculative_steps - 1:
        return
    sample_src_positions[:num_reqs] += 1
    input_buffers.input_ids[:num_reqs] = draft_tokens[:num_reqs].to(input_buffers.input_ids.dtype)
    next_input_hidden_states[:num_reqs] = hidden_states[:num_reqs]
    if advance_draft_positions:
        positions, lengths = input_buffers.positions, input_buffers.seq_lens
        positions[:num_reqs] = (positions[:num_reqs] + 1).clamp_max(max_model_len - 1)
        lengths[:num_reqs] = (lengths[:num_reqs] + 1).clamp_max(max_model_len)
