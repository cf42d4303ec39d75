"""Input preparation and bookkeeping of the second model runner (`v1.worker.gpu.input_batch`).

Each function replaces the vLLM function of the same name. Requests are few, so a loop over them
with numpy views beats masked tensor operations; names of arguments are vLLM's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def prepare_prefill_inputs(
    input_ids: Tensor,
    next_prefill_tokens: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    all_token_ids: Tensor,
    prefill_len: Tensor,
    num_computed_tokens: Tensor,
) -> None:
    """Copy the scheduled prompt tokens and look ahead to the ones behind them (0 past the end)."""
    ids, ahead = input_ids.numpy(), next_prefill_tokens.numpy()
    tokens, starts = all_token_ids.numpy(), query_start_loc.tolist()
    for row, request in enumerate(idx_mapping.tolist()):
        length, computed = int(prefill_len[request]), int(num_computed_tokens[request])
        if computed >= length:
            continue
        size = starts[row + 1] - starts[row]
        ids[starts[row] : starts[row + 1]] = tokens[request, computed : computed + size]
        following = tokens[request, computed + size : min(computed + size + len(ahead), length)]
        ahead[:, request] = 0
        ahead[: len(following), request] = following


def prepare_pos_seq_lens(
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    pos: Tensor,
    seq_lens: Tensor,
) -> None:
    """Positions of the step's tokens and lengths after it; unused lengths are 0."""
    places, lengths = pos.numpy(), seq_lens.numpy()
    starts = query_start_loc.tolist()
    requests = idx_mapping.tolist()
    for row, request in enumerate(requests):
        computed = int(num_computed_tokens[request])
        size = starts[row + 1] - starts[row]
        lengths[row] = computed + size
        places[starts[row] : starts[row + 1]] = np.arange(computed, computed + size)
    lengths[len(requests) :] = 0


def combine_sampled_and_draft_tokens(  # noqa: PLR0913, PLR0917 - vLLM's signature
    input_ids: Tensor,
    idx_mapping: Tensor,
    last_sampled_tokens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    prefill_len: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    num_logits: int,
    num_new_sampled_tokens: int = 1,
) -> Tensor:
    """Place last sampled and draft tokens into `input_ids`; rows that need logits, int64."""
    indices = torch.empty(num_logits, dtype=torch.int64)
    ids, rows = input_ids.numpy(), indices.numpy()
    ends, cumulative = query_start_loc.tolist(), cu_num_logits.tolist()
    for row, request in enumerate(idx_mapping.tolist()):
        first, last = cumulative[row], cumulative[row + 1]
        count, end = last - first, ends[row + 1]
        rows[first:last] = np.arange(end - count, end)
        length, prompt = int(seq_lens[row]), int(prefill_len[request])
        if length <= prompt:
            continue
        if num_new_sampled_tokens > 0 and length - count >= prompt:
            ids[end - count] = int(last_sampled_tokens[request])
        drafts = count - num_new_sampled_tokens
        if drafts > 0:
            ids[end - drafts : end] = draft_tokens[request, :drafts].numpy()
    return indices


def get_num_sampled_and_rejected(
    num_sampled: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    prefill_len: Tensor,
) -> tuple[Tensor, Tensor]:
    """Zero both for requests inside their prompt; rejected = logits - sampled elsewhere."""
    count = idx_mapping.shape[0]
    prefilling = seq_lens[:count] < prefill_len[idx_mapping.long()]
    num_sampled[:count].masked_fill_(prefilling, 0)
    rejected = torch.empty_like(num_sampled)
    rejected[:count] = cu_num_logits[: count + 1].diff() - num_sampled[:count]
    rejected[:count].masked_fill_(prefilling, 0)
    return num_sampled, rejected


def post_update(  # noqa: PLR0913, PLR0917 - vLLM's signature
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    last_sampled_tokens: Tensor,
    output_bin_counts: Tensor | None,
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None,
    all_token_ids: Tensor,
    total_len: Tensor,
    draft_tokens: Tensor | None = None,
    draft_tokens_out: Tensor | None = None,
) -> None:
    """Advance the state of every request by what was sampled; a negative index is skipped."""
    starts = [0] * (len(idx_mapping) + 1) if query_start_loc is None else query_start_loc.tolist()
    counts, rejections = num_sampled.tolist(), num_rejected.tolist()
    for row, request in enumerate(idx_mapping.tolist()):
        if request < 0:
            continue
        if draft_tokens is not None and draft_tokens_out is not None:
            draft_tokens_out[request] = draft_tokens[row]
        sampled = counts[row]
        if sampled > 0:
            tokens = sampled_tokens[row, :sampled]
            length = int(total_len[request])
            last_sampled_tokens[request] = tokens[-1]
            all_token_ids[request, length : length + sampled] = tokens
            total_len[request] = length + sampled
            if output_bin_counts is not None:
                ones = torch.ones(sampled, dtype=output_bin_counts.dtype)
                output_bin_counts[request].index_add_(0, tokens.long(), ones)
        num_computed_tokens[request] += starts[row + 1] - starts[row] - rejections[row]


def post_update_num_computed_tokens(
    idx_mapping: Tensor, num_computed_tokens: Tensor, query_start_loc: Tensor
) -> None:
    """Advance by the scheduled tokens."""
    count = idx_mapping.shape[0]
    sizes = query_start_loc[: count + 1].diff().to(num_computed_tokens.dtype)
    num_computed_tokens.index_add_(0, idx_mapping.long(), sizes)


def expand_idx_mapping(
    idx_mapping: Tensor, total_num_logits: int, cu_num_logits: Tensor, max_expand_len: int
) -> tuple[Tensor, Tensor]:
    """Request and local position of every logits row."""
    sizes = cu_num_logits.diff()
    expanded = torch.repeat_interleave(idx_mapping, sizes, output_size=total_num_logits)
    begins = torch.repeat_interleave(cu_num_logits[:-1], sizes, output_size=total_num_logits)
    local = torch.arange(total_num_logits, dtype=torch.int32) - begins.to(torch.int32)
    return expanded, local


def scatter_num_accepted(idx_mapping: Tensor, num_sampled: Tensor, num_accepted: Tensor) -> None:
    """Kernel of the hybrid model state: accepted tokens per request, at least 1."""
    kept = idx_mapping >= 0
    num_accepted[idx_mapping[kept].long()] = (
        num_sampled[: len(kept)][kept].clamp_min(1).to(num_accepted.dtype)
    )


def fill_num_accepted(idx_mapping: Tensor, num_accepted: Tensor, num_sampled: int) -> None:
    """Kernel of the hybrid model state: one value for all requests of the batch."""
    num_accepted[idx_mapping[idx_mapping >= 0].long()] = num_sampled


def prompt_logprobs_token_ids(
    num_tokens: int,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    all_token_ids: Tensor,
) -> Tensor:
    """The token behind each scheduled one, for prompt log-probabilities."""
    ids = torch.empty(num_tokens, dtype=torch.int64)
    starts = query_start_loc.tolist()
    for row, request in enumerate(idx_mapping.tolist()):
        size = starts[row + 1] - starts[row]
        begin = int(num_computed_tokens[request]) + 1
        following = all_token_ids[request, begin : begin + size]
        ids[starts[row] : starts[row] + following.shape[0]] = following
    return ids
