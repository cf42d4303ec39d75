"""The JSON documents of a checkpoint folder.

What: config.json of target and drafter, generation_config.json, quantization_config.json. Why
functions of the geometry: the config cannot disagree with the tensors.

What must stay true: config.json carries the keys that vLLM reads without a default and
transformers does not fill in (`mhc`, `topk_method`, `scoring_func`, `mla_use_nope`,
`indexer_rope_interleave`, `num_nextn_predict_layers`), and those of the published checkpoints that
others read. Packed families call the MLA layers "deepseek_sparse_attention" as published ones do;
transformers' own modelling needs "indexed_attention", which the BF16 twin uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from glm_exl3.format.layout import MCG_MARKER, MUL1_MARKER, TILE
from glm_exl3.ref.tiny.geometry import Geometry, TextGeometry, VisionGeometry
from glm_exl3.ref.tiny.recipe import Recipe, Role
from glm_exl3.ref.tiny.tokenizer import END_ENTRIES, MASK_ENTRY, token_id

Json = dict[str, Any]
EXL3_VERSION = "1.6.5"


def _lists(section: Mapping[str, Any]) -> Json:
    return {key: list(v) if isinstance(v, tuple) else v for key, v in section.items()}


def text_config(text: TextGeometry) -> Json:
    """The language model's part of config.json."""
    return _lists(asdict(text)) | {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "num_key_value_heads": text.num_attention_heads,
        "qk_rope_head_dim": 0,
        "qk_head_dim": text.qk_nope_head_dim,
        "head_dim": 0,
        "first_k_dense_replace": text.mlp_layer_types.count("dense"),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "mla_use_nope": True,
        "mhc": True,
        "indexer_rope_interleave": True,
        "indexer_types": ["full"] * text.num_hidden_layers,
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "use_cache": True,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": token_id("<|endoftext|>"),
        "eos_token_id": [token_id(entry) for entry in END_ENTRIES],
        "linear_attn_config": {
            "head_dim": text.linear_head_dim,
            "num_heads": text.linear_num_heads,
            "short_conv_kernel_size": text.linear_conv_kernel_dim,
            "gate_lower_bound": text.linear_lower_bound,
            "safe_gate": True,
        },
    }


def target_config(geometry: Geometry, quantization: Json | None) -> Json:
    """config.json of the target; without `quantization` it is the BF16 twin's."""
    text = text_config(geometry.text)
    if quantization is None:
        text["layer_types"] = [
            kind if kind == "linear_attention" else "indexed_attention"
            for kind in text["layer_types"]
        ]
    vision = asdict(geometry.vision) | {
        "model_type": "glm5_next_vision",
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "out_hidden_size": geometry.text.hidden_size,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        "swiglu_limit": geometry.text.swiglu_limit,
    }
    document: Json = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "image_token_id": token_id("<|image|>"),
        "image_start_token_id": token_id("<|begin_of_image|>"),
        "image_end_token_id": token_id("<|end_of_image|>"),
        "video_token_id": token_id("<|video|>"),
        "video_start_token_id": token_id("<|begin_of_video|>"),
        "video_end_token_id": token_id("<|end_of_video|>"),
        "text_config": text,
        "vision_config": vision,
    }
    return document if quantization is None else document | {"quantization_config": quantization}


def generation_config() -> Json:
    """generation_config.json: where to stop, and mild sampling."""
    return {
        "eos_token_id": [token_id(entry) for entry in END_ENTRIES],
        "pad_token_id": token_id("<|endoftext|>"),
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
    }


def processor_config(vision: VisionGeometry) -> Json:
    """processor_config.json of the target: image and video sizes by their token budget."""
    sizes = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "patch_expand_factor": 1,
        "min_image_tokens": 4,
        "max_image_tokens": 64,
    }
    return {
        "processor_class": "Glm5NextProcessor",
        "image_processor": sizes | {"image_processor_type": "Glm5NextImageProcessor"},
        "video_processor": sizes | {"video_processor_type": "Glm5NextVideoProcessor"},
    }


def draft_config(geometry: Geometry, quantization: Json | None) -> Json:
    """config.json of the DFlash2 drafter."""
    text, draft = geometry.text, geometry.draft
    document: Json = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_hidden_layers": draft.num_hidden_layers,
        "num_target_layers": text.num_hidden_layers,
        "num_attention_heads": draft.num_attention_heads,
        "num_key_value_heads": draft.num_key_value_heads,
        "head_dim": draft.head_dim,
        "max_position_embeddings": text.max_position_embeddings,
        "rms_norm_eps": draft.rms_norm_eps,
        "rope_theta": draft.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": draft.block_size,
        "eos_token_id": token_id("<|endoftext|>"),
        "pad_token_id": token_id("<|endoftext|>"),
        "dflash_config": {
            "target_layer_ids": list(draft.target_layer_ids),
            "mask_token_id": token_id(MASK_ENTRY),
            "conv_kernel_size": draft.conv_kernel_size,
            "conv_group_size": draft.conv_group_size,
            "selector_rank": draft.selector_rank,
            "selector_top_k": draft.selector_top_k,
        },
    }
    return document if quantization is None else document | {"quantization_config": quantization}


def quantization(recipe: Recipe, tensors: Mapping[str, Tensor], vision_bits: int = 16) -> Json:
    """The `quantization_config` of config.json; `bits` is the average over packed matrices."""
    trellises = [t for name, t in tensors.items() if name.endswith(".trellis")]
    weights = sum(TILE * TILE * t.shape[0] * t.shape[1] for t in trellises)
    stored = sum(16 * t.numel() for t in trellises)
    return {
        "quant_method": "exl3",
        "version": EXL3_VERSION,
        "bits": round(stored / weights, 2),
        "head_bits": recipe.packed_bits(Role.HEAD) or 16,
        "mtp_bits": recipe.packed_bits(Role.MTP_IN) or recipe.packed_bits(Role.EXPERT),
        "vision_bits": vision_bits,
        "calibration": {"rows": 0, "cols": 0},
        "out_scales": "always",
        "codebook": recipe.codebook.value,
    }


def tensor_storage(tensors: Mapping[str, Tensor]) -> Json:
    """The map of quantization_config.json: every leaf module with what is stored for it."""
    modules: dict[str, Json] = {}
    for name, tensor in sorted(tensors.items()):
        module = name.rpartition(".")[0]
        entry = modules.setdefault(module, {"stored_tensors": {}})
        entry["stored_tensors"][name] = {
            "shape": list(tensor.shape),
            "n_bytes": tensor.numel() * tensor.element_size(),
            "dtype": str(tensor.dtype),
        }
        suffix = name.rpartition(".")[2]
        if suffix == "trellis":
            bits = tensor.shape[-1] / TILE
            entry["quant_format"] = "exl3"
            entry["bits_per_weight"] = int(bits) if bits.is_integer() else bits
        elif suffix == "mcg":
            entry["mcg_multiplier"] = MCG_MARKER
        elif suffix == "mul1":
            entry["mul1_multiplier"] = MUL1_MARKER
    return modules
