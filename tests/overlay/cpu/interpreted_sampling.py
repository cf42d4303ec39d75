"""Cases of sampling and logit processors."""

from __future__ import annotations

from typing import Any

import torch
from interpreted_base import both, case, draw, i32, integers

from glm_exl3.cpu.runner import penalties, sampling


def sampled(is_drafting: bool, use_fp64: bool) -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample as theirs

    return both(
        theirs,
        sampling.gumbel_sample,
        lambda: {
            "logits": draw(6, 300) * 2,
            "expanded_idx_mapping": i32(2, 2, 0, 1, 3, 3),
            "temperature": torch.tensor([0.0, 0.7, 1.0, 1.3]),
            "seed": torch.tensor([5, -3, 1 << 40, 77]),
            "pos": torch.tensor([4, 5, 9, 100, 2, 3]),
            "apply_temperature": True,
            "is_drafting": is_drafting,
            "use_fp64": use_fp64,
        },
    )


@case
def gumbel_sample() -> tuple[Any, Any]:
    return sampled(is_drafting=False, use_fp64=False)


@case
def gumbel_draft() -> tuple[Any, Any]:
    return sampled(is_drafting=True, use_fp64=False)


@case
def gumbel_double() -> tuple[Any, Any]:
    return sampled(is_drafting=False, use_fp64=True)


@case
def token_logprobs() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs as theirs

    make = lambda: {"logits": draw(3, 200), "token_ids": integers(200, 3, 5, dtype=torch.int64)}  # noqa: E731
    return both(theirs, sampling.compute_token_logprobs, make)


@case
def min_p() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p as theirs

    return both(
        theirs,
        sampling.apply_min_p,
        lambda: {
            "logits": draw(3, 200) * 3,
            "expanded_idx_mapping": i32(1, 0, 2),
            "min_p": torch.tensor([0.0, 0.2, 0.9]),
        },
    )


@case
def bincount() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.sample.penalties import bincount as theirs

    return both(
        theirs,
        penalties.bincount,
        lambda: {
            "expanded_idx_mapping": torch.tensor([1, 0]),
            "all_token_ids": integers(96, 3, 20),
            "prompt_len": i32(5, 12, 0),
            "prefill_len": i32(9, 12, 0),
            "prompt_bin_mask": torch.ones(3, 3, dtype=torch.int32),
            "output_bin_counts": torch.ones(3, 96, dtype=torch.int32),
            "max_prefill_len": 12,
        },
    )


@case
def token_penalties() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.sample.penalties import apply_penalties as theirs

    return both(
        theirs,
        penalties.apply_penalties,
        lambda: {
            "logits": draw(4, 96),
            "expanded_idx_mapping": i32(1, 1, 1, 0),
            "token_ids": integers(96, 4),
            "expanded_local_pos": i32(0, 1, 2, 0),
            "repetition_penalty": torch.tensor([1.0, 1.4]),
            "frequency_penalty": torch.tensor([0.5, 0.2]),
            "presence_penalty": torch.tensor([0.0, -0.3]),
            "prompt_bin_mask": integers(1 << 30, 2, 3),
            "output_bin_counts": integers(3, 2, 96, seed=1),
        },
    )


@case
def thinking_budget() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget as theirs

    def make() -> dict[str, Any]:
        return {
            "logits": draw(5, 20),
            "req_ids": i32(0, 1, 2),
            "expanded_idx_mapping": i32(0, 0, 0, 1, 2),
            "thinking_token_budget": i32(3, 3, -1),
            "all_token_ids": torch.stack(
                [i32(7, 5, 1, 2, 0, 0, 0, 0), i32(5, 1, 2, 3, 4, 8, 1, 1), i32(*[5] * 8)]
            ),
            "total_len": i32(4, 8, 8),
            "input_ids": i32(2, 3, 8, 1, 1),
            "expanded_local_pos": i32(0, 1, 2, 0, 0),
            "reasoning_start_token_ids": i32(5),
            "natural_reasoning_end_token_ids": i32(9),
            "reasoning_end_token_ids": i32(8, 9),
        }

    results = []
    for function in (theirs, penalties.apply_thinking_budget):
        caches = {
            "cached_last_start": i32(-1, -1, -1),
            "cached_last_end": i32(-1, -1, -1),
            "cached_scan_pos": i32(0, 0, 0),
        }
        arguments = make()
        function(**arguments, **caches)
        results.append(arguments["logits"])
    return results[0], results[1]


@case
def chosen_logprob_ids() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.sample.logprob import _fill_logprob_token_ids_kernel

    results = []
    for function in (_fill_logprob_token_ids_kernel[(3,)], sampling.fill_logprob_token_ids):
        ids = torch.zeros(3, 4, dtype=torch.int64)
        mask = torch.zeros(3, 4, dtype=torch.bool)
        best, own = integers(50, 3, 2, seed=1), integers(50, 3, 5, seed=2)
        sampled_ids = integers(50, 3, seed=3, dtype=torch.int64)
        function(
            ids,
            4,
            mask,
            4,
            sampled_ids,
            best,
            2,
            i32(1, 0, 2),
            i32(3, 0, 1),
            own,
            5,
            NUM_TOPK=2,
            PADDED_COLS=4,
        )
        results.append((ids, mask.int()))
    return results[0], results[1]


@case
def bad_words() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words as theirs

    return both(
        theirs,
        penalties.apply_bad_words,
        lambda: {
            "logits": draw(3, 20),
            "expanded_idx_mapping": i32(0, 0, 0),
            "bad_word_token_ids": i32(7, 3, 4, 9, 4, 5, 11)[None],
            "bad_word_offsets": i32(0, 1, 4, 7)[None],
            "num_bad_words": i32(3),
            "all_token_ids": i32(1, 2, 8, 3, 0, 0)[None],
            "prompt_len": i32(2),
            "total_len": i32(4),
            "input_ids": i32(3, 4, 5),
            "expanded_local_pos": i32(0, 1, 2),
            "max_num_bad_words": 3,
        },
    )
