"""Cases of input preparation, state blocks and the model leaves."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from interpreted_base import both, case, draw, i32, integers

from glm_exl3.cpu.runner import inputs, states


def exponential(x):  # noqa: ANN001, ANN201 - a Triton function; the kernel's alias of tl.exp
    return tl.exp(x)


@case
def prepare_prefill_inputs() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.input_batch import prepare_prefill_inputs as theirs

    return both(
        theirs,
        inputs.prepare_prefill_inputs,
        lambda: {
            "input_ids": torch.zeros(16, dtype=torch.int32),
            "next_prefill_tokens": torch.zeros(2, 4, dtype=torch.int32),
            "idx_mapping": i32(2, 0, 1),
            "query_start_loc": i32(0, 5, 8, 9),
            "all_token_ids": integers(90, 4, 20),
            "prefill_len": i32(6, 4, 12, 0),
            "num_computed_tokens": i32(3, 4, 0, 0),
        },
    )


@case
def prepare_pos_seq_lens() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens as theirs

    return both(
        theirs,
        inputs.prepare_pos_seq_lens,
        lambda: {
            "idx_mapping": i32(2, 0),
            "query_start_loc": i32(0, 5, 8),
            "num_computed_tokens": i32(7, 0, 3, 0),
            "pos": torch.zeros(10, dtype=torch.int64),
            "seq_lens": torch.ones(4, dtype=torch.int32),
        },
    )


@case
def combine_sampled_and_draft_tokens() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens as theirs

    return both(
        theirs,
        inputs.combine_sampled_and_draft_tokens,
        lambda: {
            "input_ids": integers(50, 12),
            "idx_mapping": i32(1, 0, 2),
            "last_sampled_tokens": integers(90, 4, 1, seed=1),
            "query_start_loc": i32(0, 4, 9, 10),
            "seq_lens": i32(24, 5, 31),
            "prefill_len": i32(9, 20, 30, 0),
            "draft_tokens": integers(90, 4, 3, seed=2),
            "cu_num_logits": i32(0, 4, 5, 6),
            "num_logits": 6,
        },
    )


@case
def get_num_sampled_and_rejected() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected as theirs

    return both(
        theirs,
        inputs.get_num_sampled_and_rejected,
        lambda: {
            "num_sampled": i32(2, 1, 4),
            "seq_lens": i32(24, 5, 31),
            "cu_num_logits": i32(0, 4, 5, 9),
            "idx_mapping": i32(1, 0, 2),
            "prefill_len": i32(9, 20, 30, 0),
        },
    )


@case
def post_update() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.input_batch import post_update as theirs

    return both(
        theirs,
        inputs.post_update,
        lambda: {
            "idx_mapping": i32(1, -1, 2),
            "num_computed_tokens": i32(7, 8, 9, 10),
            "last_sampled_tokens": integers(9, 4, 1, dtype=torch.int64),
            "output_bin_counts": torch.zeros(4, 50, dtype=torch.int32),
            "sampled_tokens": integers(50, 3, 4, seed=3, dtype=torch.int64),
            "num_sampled": i32(3, 2, 0),
            "num_rejected": i32(1, 0, 2),
            "query_start_loc": i32(0, 4, 6, 9),
            "all_token_ids": integers(50, 4, 20),
            "total_len": i32(3, 9, 5, 2),
            "draft_tokens": integers(50, 3, 3, seed=4, dtype=torch.int64),
            "draft_tokens_out": torch.zeros(4, 3, dtype=torch.int64),
        },
    )


@case
def expand_idx_mapping() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.input_batch import expand_idx_mapping as theirs

    return both(
        theirs,
        inputs.expand_idx_mapping,
        lambda: {
            "idx_mapping": i32(3, 0, 2),
            "total_num_logits": 7,
            "cu_num_logits": i32(0, 3, 4, 7),
            "max_expand_len": 4,
        },
    )


@case
def advance_state_columns() -> tuple[Any, Any]:
    from vllm.v1.worker import mamba_utils

    def theirs(**arguments: Any) -> None:
        mamba_utils.preprocess_mamba_align_fused_kernel[(1,)](*arguments.values())

    return both(
        theirs,
        states.advance_state_columns,
        lambda: {
            "idx_mapping": i32(2, 0, 1),
            "state_idx": i32(-1, 0, 3, 9),
            "num_computed_tokens": i32(0, 15, 70, 9),
            "query_start_loc": i32(0, 4, 20, 21),
            "num_accepted_tokens": i32(1, 2, 3, 1),
            "src_col": i32(8, 8, 8, 8),
            "src_off": i32(8, 8, 8, 8),
            "num_reqs": 3,
            "BLOCK_SIZE": 4,
            "MAMBA_BLOCK_SIZE": 16,
        },
    )


@case
def align_block_table() -> tuple[Any, Any]:
    from vllm.v1.attention.backends.utils import _mamba_align_block_table_kernel

    def theirs(**arguments: Any) -> None:
        _mamba_align_block_table_kernel[(3,)](*arguments.values())

    table = integers(90, 3, 6)
    return both(
        theirs,
        states.align_block_table,
        lambda: {
            "out": torch.zeros(3, 3, dtype=torch.int32),
            "block_table": table,
            "block_table_stride_0": table.stride(0),
            "block_table_stride_1": table.stride(1),
            "seq_lens": i32(17, 0, 48),
            "seq_lens_stride": 1,
            "block_size": 16,
            "n_out": 3,
            "BLOCK": 4,
        },
    )


def recurrent(accepted: torch.Tensor | None) -> tuple[Any, Any]:
    from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent
    from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent_kda as theirs

    from glm_exl3.cpu.leaves import kda

    fused_recurrent.exp = triton.jit(exponential)

    steps = 3 if accepted is not None else 1
    tokens, heads, width = 2 * steps, 2, 128
    table = torch.tensor([[1, 2, 3], [6, 5, 4]], dtype=torch.int32)
    results = []
    for function in (theirs, kda.fused_recurrent_kda):
        cache = draw(8, heads, width, width, seed=9) * 0.1
        out, _ = function(
            q=draw(1, tokens, heads, width, seed=1),
            k=draw(1, tokens, heads, width, seed=2),
            v=draw(1, tokens, heads, width, seed=3),
            g=draw(1, tokens, heads, width, seed=4),
            beta=draw(1, tokens, heads, seed=5),
            initial_state=cache,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=i32(0, steps, 2 * steps),
            ssm_state_indices=table if accepted is not None else table[:, 0].contiguous(),
            num_accepted_tokens=accepted,
            sigmoid_beta=True,
            a_log=draw(1, 1, heads, 1, seed=6) * 0.3,
            g_bias=draw(heads * width, seed=7),
            compute_gate=True,
            lower_bound=-5.0,
        )
        results.append((out, cache[1:]))
    return results[0], results[1]


@case
def kda_decode() -> tuple[Any, Any]:
    return recurrent(None)


@case
def kda_verify() -> tuple[Any, Any]:
    return recurrent(i32(2, 3))


@case
def expand_pools() -> tuple[Any, Any]:
    from vllm.models.glm5next.nvidia.ops.kpool_compress import expand_pools_and_append_tail

    from glm_exl3.ref import indexer

    pools, lengths = torch.tensor([[3, 0, -1], [1, -1, -1]]), i32(70, 31)
    return (
        expand_pools_and_append_tail(pools, lengths, 16),
        indexer.expand_pools(pools, lengths, 16),
    )
