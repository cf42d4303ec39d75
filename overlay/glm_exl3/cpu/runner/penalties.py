"""Logit processors of the second model runner that are kernels in vLLM: penalties, biases, words.

Each function replaces the vLLM function of the same name; rows are few, so they are looped over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm_exl3.cpu.runner.sampling import unpack_bits

NEVER = float("-inf")
FORCED = 1.0e9


def apply_penalties(  # noqa: PLR0913, PLR0917 - vLLM's signature
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    token_ids: Tensor,
    expanded_local_pos: Tensor,
    repetition_penalty: Tensor,
    frequency_penalty: Tensor,
    presence_penalty: Tensor,
    prompt_bin_mask: Tensor,
    output_bin_counts: Tensor,
) -> None:
    """Repetition, frequency and presence penalties; drafts before a row count as output."""
    vocabulary = logits.shape[1]
    local = expanded_local_pos.tolist()
    for row, request in enumerate(expanded_idx_mapping.tolist()):
        repeat = float(repetition_penalty[request])
        frequent, present = float(frequency_penalty[request]), float(presence_penalty[request])
        if repeat == 1.0 and frequent == 0.0 and present == 0.0:
            continue
        counts = output_bin_counts[request, :vocabulary].clone()
        drafts = token_ids[row - local[row] + 1 : row + 1].long()
        counts.index_add_(0, drafts, torch.ones_like(drafts, dtype=counts.dtype))
        values = logits[row].float()
        if repeat != 1.0:
            seen = unpack_bits(prompt_bin_mask[request], vocabulary) | (counts > 0)
            scaled = torch.where(values > 0, values / repeat, values * repeat)
            values = torch.where(seen, scaled, values)
        values = values - frequent * counts - present * (counts > 0)
        logits[row] = values.to(logits.dtype)


def bincount(
    expanded_idx_mapping: Tensor,
    all_token_ids: Tensor,
    prompt_len: Tensor,
    prefill_len: Tensor,
    prompt_bin_mask: Tensor,
    output_bin_counts: Tensor,
    max_prefill_len: int,
) -> None:
    """Which tokens a request's prompt holds (bits) and how often its output so far (counts)."""
    for request in expanded_idx_mapping.tolist():
        prompt, prefill = int(prompt_len[request]), int(prefill_len[request])
        prompt_bin_mask[request] = 0
        output_bin_counts[request] = 0
        present = torch.zeros(prompt_bin_mask.shape[1] * 32, dtype=torch.int64)
        present[all_token_ids[request, :prompt].long()] = 1
        words = (present.view(-1, 32) << torch.arange(32)).sum(1)
        prompt_bin_mask[request] = torch.where(words >= 1 << 31, words - (1 << 32), words).to(
            prompt_bin_mask.dtype
        )
        output = all_token_ids[request, prompt:prefill].long()
        ones = torch.ones_like(output, dtype=output_bin_counts.dtype)
        output_bin_counts[request].index_add_(0, output, ones)


def apply_logit_bias(  # noqa: PLR0913, PLR0917 - vLLM's signature
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    pos: Tensor,
    num_allowed_token_ids: Tensor,
    allowed_token_ids: Tensor,
    num_logit_bias: Tensor,
    logit_bias_token_ids: Tensor,
    logit_bias: Tensor,
    min_lens: Tensor,
    num_stop_token_ids: Tensor,
    restore_when_all_masked: Tensor,
    stop_token_ids: Tensor,
    enable_stop_token_restore: bool = False,
) -> None:
    """Allowed tokens, additive biases and the minimum length, per row in that order."""
    for row, request in enumerate(expanded_idx_mapping.tolist()):
        values = logits[row]
        allowed = int(num_allowed_token_ids[request])
        if allowed > 0:
            ids = allowed_token_ids[request, :allowed].long()
            kept = values[ids].clone()
            values.fill_(NEVER)
            values[ids] = kept
        biases = int(num_logit_bias[request])
        if biases > 0:
            ids = logit_bias_token_ids[request, :biases].long()
            values[ids] += logit_bias[request, :biases].to(values.dtype)
        stops = int(num_stop_token_ids[request])
        if stops == 0 or int(pos[row]) + 1 >= int(min_lens[request]):
            continue
        ids = stop_token_ids[request, :stops].long()
        kept = values[ids].clone()
        values[ids] = NEVER
        restore = enable_stop_token_restore and bool(restore_when_all_masked[request])
        if restore and float(values.max()) == NEVER:
            values[ids] = torch.where(kept.isfinite(), kept, values[ids])


def _last(text: list[int], marker: list[int]) -> int:
    """Where `marker` begins last in `text`, -1 if nowhere."""
    size = len(marker)
    for begin in range(len(text) - size, -1, -1):
        if text[begin : begin + size] == marker:
            return begin
    return -1


def apply_thinking_budget(  # noqa: PLR0913, PLR0917 - vLLM's signature
    logits: Tensor,
    req_ids: Tensor,
    expanded_idx_mapping: Tensor,
    thinking_token_budget: Tensor,
    all_token_ids: Tensor,
    total_len: Tensor,
    input_ids: Tensor,
    expanded_local_pos: Tensor,
    cached_last_start: Tensor,
    cached_last_end: Tensor,
    cached_scan_pos: Tensor,
    reasoning_start_token_ids: Tensor,
    natural_reasoning_end_token_ids: Tensor,
    reasoning_end_token_ids: Tensor,
) -> None:
    """Force the end of the reasoning once it is as long as its budget; -1 is no budget."""
    start, natural, end = (
        ids.tolist()
        for ids in (
            reasoning_start_token_ids,
            natural_reasoning_end_token_ids,
            reasoning_end_token_ids,
        )
    )
    local = expanded_local_pos.tolist()
    for row, request in enumerate(expanded_idx_mapping.tolist()):
        budget = int(thinking_token_budget[request])
        if budget < 0:
            continue
        text = all_token_ids[request, : int(total_len[request])].tolist()
        text += input_ids[row - local[row] + 1 : row + 1].tolist()
        opened = _last(text, start)
        if opened < 0 or opened <= _last(text, natural):
            continue
        if len(text) - opened - len(start) < budget:
            continue
        begun = [size for size in range(1, len(end)) if text[-size:] == end[:size]]
        logits[row, end[max(begun, default=0)]] = FORCED


def apply_bad_words(  # noqa: PLR0913, PLR0917 - vLLM's signature
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    bad_word_token_ids: Tensor,
    bad_word_offsets: Tensor,
    num_bad_words: Tensor,
    all_token_ids: Tensor,
    prompt_len: Tensor,
    total_len: Tensor,
    input_ids: Tensor,
    expanded_local_pos: Tensor,
    max_num_bad_words: int,
) -> None:
    """Mask the last token of a bad word whose other tokens end the output (drafts included)."""
    local = expanded_local_pos.tolist()
    for row, request in enumerate(expanded_idx_mapping.tolist()):
        output = all_token_ids[request, int(prompt_len[request]) : int(total_len[request])]
        drafts = input_ids[row - local[row] + 1 : row + 1]
        text = output.tolist() + drafts.tolist()
        offsets = bad_word_offsets[request].tolist()
        words = bad_word_token_ids[request].tolist()
        for index in range(int(num_bad_words[request])):
            *prefix, last = words[offsets[index] : offsets[index + 1]]
            if not prefix or text[-len(prefix) :] == prefix:
                logits[row, last] = NEVER
