"""Cases of verification and of the speculators."""

from __future__ import annotations

import types
from typing import Any

import torch
from interpreted_base import both, case, draw, i32, integers

from glm_exl3.cpu.runner import drafting, rejection


def verified(temperature: float) -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample as theirs

    logits = draw(9, 64, seed=6)
    best = logits.argmax(-1)
    drafts = torch.cat([best[:1], best[:8]])
    drafts[3] = (drafts[3] + 1) % 64
    drafts[7] = -1
    make = lambda: {  # noqa: E731
        "target_logits": logits.clone(),
        "draft_logits": None,
        "draft_sampled": drafts.clone(),
        "cu_num_logits": i32(0, 4, 8, 9),
        "pos": torch.arange(9),
        "idx_mapping": i32(1, 0, 2),
        "expanded_idx_mapping": i32(1, 1, 1, 1, 0, 0, 0, 0, 2),
        "expanded_local_pos": i32(0, 1, 2, 3, 0, 1, 2, 3, 0),
        "temperature": torch.full((3,), temperature),
        "seed": torch.tensor([3, 4, 5]),
        "num_speculative_steps": 3,
    }
    results = []
    for function in (theirs, rejection.rejection_sample):
        tokens, counts = function(**make())
        kept = torch.arange(tokens.shape[1])[None] < counts[:, None]
        results.append((torch.where(kept, tokens, -1), counts))
    return results[0], results[1]


@case
def rejection_greedy() -> tuple[Any, Any]:
    return verified(0.0)


@case
def gather_draft_sampled() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import gather_draft_sampled as theirs

    return both(
        theirs,
        rejection.gather_draft_sampled,
        lambda: {
            "input_ids": integers(90, 10),
            "positions": torch.arange(10, 20),
            "logits_indices": torch.tensor([2, 3, 4, 7, 8]),
            "expanded_idx_mapping": i32(0, 0, 0, 1, 1),
            "expanded_local_pos": i32(0, 1, 2, 0, 1),
            "prefill_len": i32(13, 16),
        },
    )


def dflash_arguments() -> dict[str, Any]:
    buffers = types.SimpleNamespace(
        input_ids=torch.full((12,), 9, dtype=torch.int32),
        positions=torch.full((12,), 9, dtype=torch.int64),
        is_padding=torch.zeros(12, dtype=torch.bool),
        query_start_loc=torch.zeros(4, dtype=torch.int32),
        seq_lens=torch.full((3,), 9, dtype=torch.int32),
    )
    batch = types.SimpleNamespace(
        num_reqs=2,
        num_scheduled_tokens=torch.tensor([4, 3]).numpy(),
        positions=torch.tensor([20, 21, 22, 23, 6, 7, 8]),
        query_start_loc=i32(0, 4, 7),
        idx_mapping=i32(1, 0),
    )
    return {
        "input_buffers": buffers,
        "query_slot_mapping": torch.zeros(12, dtype=torch.int64),
        "context_positions": torch.zeros(12, dtype=torch.int64),
        "context_slot_mapping": torch.zeros(12, dtype=torch.int64),
        "sample_indices": torch.ones(9, dtype=torch.int64),
        "sample_pos": torch.ones(9, dtype=torch.int64),
        "sample_idx_mapping": torch.ones(9, dtype=torch.int32),
        "temperature": torch.zeros(3),
        "seeds": torch.zeros(3, dtype=torch.int64),
        "input_batch": batch,
        "num_sampled": i32(2, 0),
        "num_rejected": i32(1, 0),
        "last_sampled": torch.tensor([31, 32, 33]),
        "next_prefill_tokens": i32(41, 42, 43),
        "input_temperature": torch.tensor([0.5, 0.0, 1.0]),
        "input_seeds": torch.tensor([7, 8, 9]),
        "block_table": torch.tensor([[0, 3, 4, 0], [5, 0, 2, 1]], dtype=torch.int32),
        "block_size": 8,
        "cp_rank": 0,
        "cp_size": 1,
        "cp_interleave": 1,
        "parallel_drafting_token_id": 99,
        "num_query_per_req": 4,
        "num_speculative_steps": 3,
        "max_num_reqs": 3,
        "max_num_tokens": 12,
        "max_model_len": 25,
    }


@case
def prepare_dflash_inputs() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import prepare_dflash_inputs as theirs

    return both(theirs, drafting.prepare_dflash_inputs, dflash_arguments)


def buffers_and_batch() -> tuple[Any, Any]:
    buffers = types.SimpleNamespace(
        input_ids=torch.full((12,), 9, dtype=torch.int32),
        positions=torch.arange(12),
        query_start_loc=torch.zeros(5, dtype=torch.int32),
        seq_lens=i32(24, 9, 5, 5),
    )
    batch = types.SimpleNamespace(
        num_reqs=2,
        input_ids=integers(90, 7),
        positions=torch.tensor([20, 21, 22, 23, 6, 7, 8]),
        query_start_loc=i32(0, 4, 7),
        idx_mapping=i32(1, 0),
        seq_lens=i32(24, 9),
    )
    return buffers, batch


@case
def mtp_prefill_inputs() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    def make() -> dict[str, Any]:
        buffers, batch = buffers_and_batch()
        return {
            "last_token_indices": torch.ones(4, dtype=torch.int64),
            "current_draft_step": torch.ones(1, dtype=torch.int32),
            "input_buffers": buffers,
            "input_batch": batch,
            "num_sampled": i32(2, 0),
            "num_rejected": i32(1, 0),
            "last_sampled": torch.tensor([31, 32, 33]),
            "next_prefill_tokens": i32(41, 42, 43),
            "max_num_reqs": 4,
        }

    return both(speculator.prepare_prefill_inputs, drafting.prepare_prefill_inputs, make)


@case
def mtp_decode_inputs() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    make = lambda: {  # noqa: E731
        "draft_tokens": integers(90, 2, 3, dtype=torch.int64),
        "target_seq_lens": i32(24, 9),
        "num_rejected": i32(1, 0),
        "input_buffers": buffers_and_batch()[0],
        "sample_src_positions": torch.tensor([5, 6, 7, 8]),
        "max_model_len": 24,
        "max_num_reqs": 4,
    }
    return both(speculator.prepare_decode_inputs, drafting.prepare_decode_inputs, make)


@case
def mtp_update_inputs() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    make = lambda: {  # noqa: E731
        "draft_tokens": torch.tensor([4, 5]),
        "current_draft_step": torch.tensor([1], dtype=torch.int32),
        "hidden_states": draw(2, 16),
        "output_draft_tokens": torch.zeros(4, 3, dtype=torch.int64),
        "next_input_hidden_states": torch.zeros(4, 16),
        "input_buffers": buffers_and_batch()[0],
        "sample_src_positions": torch.tensor([5, 6, 7, 8]),
        "num_reqs": 2,
        "max_model_len": 24,
        "num_speculative_steps": 3,
    }
    return both(speculator.update_draft_inputs, drafting.update_draft_inputs, make)


@case
def candidate_walk() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.spec_decode.dflash2 import speculator

    results = []
    for function in (speculator.CandidateSampler.sample, drafting.walk_candidates):
        sampler = speculator.CandidateSampler(4, 3, 8, torch.device("cpu"))
        sampler.scores.zero_()
        tokens = torch.zeros(4, 3, dtype=torch.int64)
        logits = torch.full((4, 3, 64), float("-inf"))
        function(
            sampler,
            integers(64, 2, 3, 8, dtype=torch.int64),
            draw(2, 3, 8, 8),
            2,
            torch.arange(5, 11),
            i32(3, 3, 3, 0, 0, 0, -1, -1, -1),
            torch.tensor([0.0, 0.0, 0.0, 0.8]),
            torch.tensor([3, 4, 5, 6]),
            tokens,
            logits,
            False,
        )
        results.append((tokens, logits, sampler.scores[:2], sampler.cached_candidate_ids))
    return results[0], results[1]
