"""Every vLLM name that the CPU engine replaces.

Grouped by module of vLLM. `why` completes "without it ..."; most kernels are Triton or CUDA code
that a CPU cannot run.
"""

from __future__ import annotations

from glm_exl3.cpu.replacements import Replacement

_KERNEL = "this is a kernel that a CPU cannot run."
_RUNNER = "vllm.v1.worker.gpu."
_LEAF = "glm_exl3.cpu.leaves."
_OWN = "glm_exl3.cpu.runner."
_GLM = "vllm.models.glm5next."


def _same(module: str, by: str, names: dict[str, str], why: str = _KERNEL) -> list[Replacement]:
    return [Replacement(module, name, f"{by}:{own}", why) for name, own in names.items()]


MODEL = (
    *_same(
        _GLM + "common.kda",
        _LEAF + "kda",
        {
            name: name
            for name in (
                "chunk_kda_with_fused_gate",
                "fused_recurrent_kda",
                "gather_initial_states",
                "scatter_states",
                "causal_conv1d_fn",
                "causal_conv1d_update",
            )
        },
    ),
    *_same(
        _GLM + "common.attention",
        _LEAF + "indexer",
        {
            "fwht128_quant_fp8": "fwht128_quant_fp8",
            "_fused_indexer_k_norm": "k_norm",
            "_fused_indexer_weight_scale": "weight_scale",
            "_pad_indexer_heads": "keep_heads",
        },
    ),
    Replacement(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        _LEAF + "layers:keep_weight",
        "linear layers are repacked for CPU kernels that this build lacks.",
    ),
    Replacement(
        _GLM + "nvidia.sparse_indexer",
        "sparse_attn_indexer_kpool",
        _LEAF + "indexer:sparse_attn_indexer_kpool",
        _KERNEL,
    ),
    Replacement(
        "vllm.v1.attention.backends.mla.indexer",
        "Glm5NextIndexerBackend.get_builder_cls",
        _LEAF + "indexer:builder_class",
        "the builder launches kernels for metadata that only GPU kernels read.",
    ),
    Replacement(
        "vllm.model_executor.layers.mla",
        "fused_q_kv_rmsnorm",
        _LEAF + "layers:fused_q_kv_rmsnorm",
        _KERNEL,
    ),
    Replacement(
        _GLM + "nvidia.ops.fused_eh_norm", "fused_eh_norm", _LEAF + "layers:fused_eh_norm", _KERNEL
    ),
    *_same(
        "vllm.model_executor.layers.mhc",
        _LEAF + "mhc",
        {
            "MHCPreOp.forward_cpu": "pre",
            "MHCPostOp.forward_cpu": "post",
            "MHCFusedPostPreOp.forward_cpu": "post_pre",
        },
        "every layer's norm weight is dropped and the logits are wrong.",
    ),
    *_same(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        _LEAF + "layers",
        {
            "CPUUnquantizedExperts.process_weights_after_loading": "prepare_experts",
            "CPUUnquantizedExperts.apply": "apply_experts",
        },
        "the clamp of the experts' activations is dropped and the logits are wrong.",
    ),
)

RUNNER = (
    Replacement(
        "vllm.distributed.device_communicators.shm_broadcast",
        "SpinCondition.wait",
        _OWN + "waiting:wait",
        "idle processes spin on the cores that the ranks compute with.",
    ),
    Replacement(
        "vllm.v1.worker.gpu_worker",
        "HAS_TRITON",
        _OWN + "kernels:HAS_KERNELS",
        "the worker refuses the model runner whose kernels are replaced here.",
    ),
    *_same(
        _RUNNER + "buffer_utils",
        _OWN + "tables",
        {"StagedWriteTensor.apply_write": "apply_write", "FusedStagedWriter.apply": "apply_fused"},
    ),
    *_same(
        _RUNNER + "block_table",
        _OWN + "tables",
        {
            "BlockTables.gather_block_tables": "gather_block_tables",
            "BlockTables.compute_slot_mappings": "compute_slot_mappings",
        },
    ),
    *_same(
        _RUNNER + "input_batch",
        _OWN + "inputs",
        {
            name: name
            for name in (
                "prepare_prefill_inputs",
                "prepare_pos_seq_lens",
                "combine_sampled_and_draft_tokens",
                "get_num_sampled_and_rejected",
                "post_update",
                "post_update_num_computed_tokens",
                "expand_idx_mapping",
            )
        },
    ),
    *_same(
        _RUNNER + "model_states.mamba_hybrid",
        _OWN + "kernels",
        {
            "_scatter_num_accepted_kernel": "scatter_num_accepted",
            "_fill_num_accepted_kernel": "fill_num_accepted",
            "preprocess_mamba_align_fused_kernel": "advance_state_columns",
        },
    ),
    *_same(
        "vllm.v1.worker.mamba_utils",
        _OWN + "states",
        {
            f"MambaSpecDecodeGPUContext.{name}": name
            for name in (
                "run_fused_precopy",
                "run_fused_postprocess_align",
                "compute_aligned_state_indices",
            )
        },
    ),
    Replacement(
        "vllm.v1.worker.utils", "_zero_kv_blocks_kernel", _OWN + "kernels:zero_blocks", _KERNEL
    ),
    Replacement(
        "vllm.v1.attention.backends.utils",
        "_mamba_align_block_table_kernel",
        _OWN + "kernels:align_block_table",
        _KERNEL,
    ),
)

SAMPLING = (
    *_same(
        _RUNNER + "sample.gumbel",
        _OWN + "sampling",
        {"gumbel_sample": "gumbel_sample", "apply_temperature": "apply_temperature"},
    ),
    Replacement(
        _RUNNER + "sample.logprob",
        "compute_token_logprobs",
        _OWN + "sampling:compute_token_logprobs",
        _KERNEL,
    ),
    Replacement(
        "vllm.triton_utils.importing",
        "TritonPlaceholder.next_power_of_2",
        _OWN + "kernels:next_power_of_2",
        "functions that launch replaced kernels compute block sizes with it.",
        adds=True,
    ),
    Replacement(
        _RUNNER + "sample.logprob",
        "_fill_logprob_token_ids_kernel",
        _OWN + "kernels:fill_logprob_token_ids",
        _KERNEL,
    ),
    Replacement(
        _RUNNER + "sample.thinking_budget",
        "apply_thinking_budget",
        _OWN + "penalties:apply_thinking_budget",
        _KERNEL,
    ),
    Replacement(_RUNNER + "sample.logprob", "_ranks_kernel", _OWN + "kernels:ranks", _KERNEL),
    Replacement(
        _RUNNER + "sample.prompt_logprob",
        "get_prompt_logprobs_token_ids",
        _OWN + "inputs:prompt_logprobs_token_ids",
        _KERNEL,
    ),
    Replacement(_RUNNER + "sample.min_p", "apply_min_p", _OWN + "sampling:apply_min_p", _KERNEL),
    Replacement(
        _RUNNER + "metrics.logits", "get_num_nans", _OWN + "sampling:get_num_nans", _KERNEL
    ),
    *_same(
        _RUNNER + "sample.penalties",
        _OWN + "penalties",
        {"apply_penalties": "apply_penalties", "bincount": "bincount"},
    ),
    Replacement(
        _RUNNER + "sample.logit_bias",
        "apply_logit_bias",
        _OWN + "penalties:apply_logit_bias",
        _KERNEL,
    ),
    Replacement(
        _RUNNER + "sample.bad_words",
        "apply_bad_words",
        _OWN + "penalties:apply_bad_words",
        _KERNEL,
    ),
    Replacement(
        _RUNNER + "structured_outputs",
        "_apply_grammar_bitmask_kernel",
        _OWN + "kernels:grammar_bitmask",
        _KERNEL,
    ),
)

SPECULATION = (
    Replacement(
        _RUNNER + "spec_decode.rejection_sampler_utils",
        "rejection_sample",
        _OWN + "rejection:rejection_sample",
        _KERNEL,
    ),
    Replacement(
        _RUNNER + "spec_decode.rejection_sampler",
        "gather_draft_sampled",
        _OWN + "rejection:gather_draft_sampled",
        _KERNEL,
    ),
    Replacement(
        _RUNNER + "spec_decode.rejection_sampler",
        "_flatten_sampled_kernel",
        _OWN + "kernels:flatten_sampled",
        _KERNEL,
    ),
    Replacement(
        _RUNNER + "spec_decode.dflash.speculator",
        "prepare_dflash_inputs",
        _OWN + "drafting:prepare_dflash_inputs",
        _KERNEL,
    ),
    Replacement(
        _RUNNER + "spec_decode.dflash2.speculator",
        "CandidateSampler.sample",
        _OWN + "drafting:walk_candidates",
        _KERNEL,
    ),
    *_same(
        _RUNNER + "spec_decode.target_dependent_ar.speculator",
        _OWN + "drafting",
        {
            name: name
            for name in ("prepare_prefill_inputs", "prepare_decode_inputs", "update_draft_inputs")
        },
    ),
)

REPLACEMENTS = MODEL + RUNNER + SAMPLING + SPECULATION
