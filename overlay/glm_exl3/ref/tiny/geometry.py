"""The dims of the small GLM-5.3-Flash models, typed, from one file.

What: `geometry.json` holds every dim of the tiny checkpoints and of the trained miniature; this
module reads it once. Why one file: a checkpoint, a kernel test and a training run that disagree
about a dim fail far from the cause.

What must stay true, and who asks for it (vLLM 0.33.0):
- every packed dim is a multiple of 128, and so is its share at tensor parallel 2 and 4, so heads
  of 128 (KDA, drafter), 16 MLA heads of 64 and an expert width of 512;
- `vocab_size` is 15 blocks of 128: four ranks get 4, 4, 4 and 3, as unevenly as the real 1,210;
- `kv_lora_rank` is 512 and the rope dim 0: the NoPE back ends of SM90, SM100 and SM120 accept no
  other latent width (FlashMLA and FlashInfer pad 16 heads to their own tile);
- `index_head_dim` is 128 (asserted) and the 4 index heads are padded to DeepGEMM's 32;
- `index_topk` is a multiple of `index_kpool`, and small enough for a test prompt to exceed it;
- `hidden_size` is a multiple of 128, which the fused mHC kernel splits over its threads, and of
  64 x `hc_mult` for DeepGEMM's pre-norm GEMM;
- the KDA state of one sequence is larger than a few hundred MLA rows, which is what sets vLLM's
  attention block size; with these dims prefixes of about a thousand tokens can be cached.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

GEOMETRY_FILE = Path(__file__).with_name("geometry.json")


@dataclass(frozen=True)
class TextGeometry:
    """The language model, with the field names of its config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    swiglu_limit: float
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int
    linear_lower_bound: float
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    num_nextn_predict_layers: int
    max_position_embeddings: int
    rms_norm_eps: float

    @property
    def linear_width(self) -> int:
        """Features of one of q, k, v of a KDA layer."""
        return self.linear_num_heads * self.linear_head_dim

    @property
    def mtp_layer(self) -> int:
        """Index of the MTP layer: the first one behind the language model's own."""
        return self.num_hidden_layers

    def is_linear(self, layer: int) -> bool:
        """Whether a layer is KDA; the MTP layer is MLA."""
        return layer < self.num_hidden_layers and self.layer_types[layer] == "linear_attention"

    def is_sparse_mlp(self, layer: int) -> bool:
        """Whether a layer has routed experts; the MTP layer has."""
        return layer >= self.num_hidden_layers or self.mlp_layer_types[layer] == "sparse"


@dataclass(frozen=True)
class VisionGeometry:
    """The vision tower, with the field names of its config.json."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    projection_intermediate_size: int
    image_size: int
    patch_size: int
    in_channels: int
    spatial_merge_size: int
    temporal_patch_size: int


@dataclass(frozen=True)
class DraftGeometry:
    """The DFlash2 drafter; hidden size and vocabulary are the target's."""

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    target_layer_ids: tuple[int, ...]
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    block_size: int
    rms_norm_eps: float
    rope_theta: float

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class Geometry:
    """All dims of one small model with its drafter."""

    text: TextGeometry
    vision: VisionGeometry
    draft: DraftGeometry


def parse(document: dict[str, Any]) -> Geometry:
    """A geometry from parsed JSON. A missing or unknown field is a TypeError that names it."""

    def frozen(section: dict[str, Any]) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in section.items()}

    return Geometry(
        text=TextGeometry(**frozen(document["text"])),
        vision=VisionGeometry(**frozen(document["vision"])),
        draft=DraftGeometry(**frozen(document["draft"])),
    )


@cache
def geometry() -> Geometry:
    """The geometry in `geometry.json`."""
    return parse(json.loads(GEOMETRY_FILE.read_text(encoding="utf-8")))
