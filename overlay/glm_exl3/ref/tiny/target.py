"""The tensors of a tiny GLM-5.3-Flash: language model, MTP layer, vision tower.

What: `target_tensors` builds the complete state dict of a family under the names of its
checkpoints: Hugging Face's for `tr3`, ExLlamaV3's for `full` (KDA q, k, v as one `qkv_proj`, the
convolutions as one `conv1d.weight`). Why random layers around a structured vocabulary: the values
of the layers do not matter, that every part is exercised does.

What must stay true: top logits stay below 8 (`HEAD_GAIN`), where a bf16 logit still resolves 0.03
nat; beyond, engines that round logits differently disagree at margins that are no near-ties. Some
gate and up projections have a gain that reaches the SwiGLU clamp. Everything that vLLM and
transformers hold in different dtypes is representable in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm_exl3.ref.decode import dequantize
from glm_exl3.ref.tiny.geometry import Geometry, TextGeometry, VisionGeometry
from glm_exl3.ref.tiny.matrices import MatrixMaker, Packed
from glm_exl3.ref.tiny.recipe import RECIPES, Family, RandomStreams, Recipe, Role
from glm_exl3.ref.tiny.vocabulary import Cycles, cycles, embeddings, visible_norm

PREFIX = "model.language_model"
HEAD_BITS = 6
HEAD_GAIN = 1.2


@dataclass(frozen=True)
class Gains:
    """Output over input RMS of the maps that shape a block's contribution to the residual."""

    gate: float = 4.0
    up: float = 4.0
    mlp_out: float = 0.04
    kda_out: float = 1.6
    mla_out: float = 1.5
    mla_query: float = 2.0
    router: float = 1.5
    mtp: float = 0.3
    mtp_hidden: float = 0.2


def target_tensors(family: Family, geometry: Geometry, seed: int) -> dict[str, Tensor]:
    """The state dict of a packed family; the same seed gives the same values."""
    maker = MatrixMaker(RandomStreams(seed), RECIPES[family])
    text, gains = geometry.text, Gains()
    table = cycles(maker.streams)
    head = add_head(maker, text, table)
    maker.plain(f"{PREFIX}.embed_tokens.weight", embeddings(table, head, maker.recipe.pull))
    add_final_norm(maker, f"{PREFIX}.norm", text.hidden_size)
    for layer in range(text.num_hidden_layers):
        add_layer(maker, text, layer, gains)
    for layer in range(text.mtp_layer, text.mtp_layer + text.num_nextn_predict_layers):
        add_mtp_layer(maker, text, layer, gains)
    add_vision(maker, geometry.vision, text.hidden_size)
    return maker.tensors


def packed_head(
    streams: RandomStreams, recipe: Recipe, text: TextGeometry, table: Cycles
) -> Packed:
    """`lm_head` as a random trellis at 6 bits; its decoded values are the head of a family."""
    size, gain = (text.hidden_size, text.vocab_size), HEAD_GAIN * table.loudness
    return MatrixMaker(streams, recipe).packed("lm_head", size, HEAD_BITS, gain)


def decoded_head(
    streams: RandomStreams, recipe: Recipe, text: TextGeometry, table: Cycles
) -> Tensor:
    """The rows of `lm_head` fp64 `[V, H]`, each at its token's loudness."""
    packed = packed_head(streams, recipe, text, table)
    scales = packed.suh, packed.svh
    return dequantize(packed.trellis, *scales, packed.codebook, torch.float64).T


def add_head(maker: MatrixMaker, text: TextGeometry, table: Cycles) -> Tensor:
    """Add `lm_head`; returns its rows fp64 `[V, H]`."""
    if maker.recipe.packed_bits(Role.HEAD) is None:
        rows = decoded_head(maker.streams, maker.recipe, text, table)
        maker.plain("lm_head.weight", rows)
        return rows
    packed = packed_head(maker.streams, maker.recipe, text, table)
    maker.tensors |= packed.state_dict("lm_head")
    return decoded_head(maker.streams, maker.recipe, text, table)


def add_final_norm(maker: MatrixMaker, name: str, size: int) -> None:
    """The norm in front of the head, which removes the hidden part of the embeddings."""
    maker.plain(f"{name}.weight", visible_norm(1 + 0.1 * maker.streams.normal(name, size)))


def add_layer(maker: MatrixMaker, text: TextGeometry, layer: int, gains: Gains) -> None:
    """One decoder layer with its two hyper-connections."""
    key = f"{PREFIX}.layers.{layer}"
    maker.norm(f"{key}.input_layernorm", text.hidden_size)
    maker.norm(f"{key}.post_attention_layernorm", text.hidden_size)
    if text.is_linear(layer):
        add_kda(maker, text, f"{key}.self_attn", gains.kda_out)
    else:
        add_mla(maker, text, f"{key}.self_attn", gains.mla_query, gains.mla_out)
    if text.is_sparse_mlp(layer):
        add_moe(maker, text, f"{key}.mlp", gains, gains.mlp_out)
    else:
        add_mlp(maker, f"{key}.mlp", Role.DENSE, _mlp_size(text), gains, gains.mlp_out)
    for block in ("attn", "ffn"):
        add_hyper_connection(maker, text, f"{key}.hc_{block}")


def add_mtp_layer(maker: MatrixMaker, text: TextGeometry, layer: int, gains: Gains) -> None:
    """The MTP layer: norms, input projection, one MLA and MoE block without hyper-connections.

    The input projection passes the embedding of the newest token through, so the shared head reads
    that token's successor; the hidden state and the block only disturb it a little.
    """
    key, hidden = f"{PREFIX}.layers.{layer}", text.hidden_size
    for norm in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm"):
        maker.norm(f"{key}.{norm}", hidden)
    add_final_norm(maker, f"{key}.shared_head.norm", hidden)
    noise = gains.mtp_hidden * maker.streams.normal(f"{key}.eh_proj", hidden, hidden)
    embedding, state = torch.eye(hidden), noise / hidden**0.5
    maker.structured(f"{key}.eh_proj", Role.MTP_IN, torch.cat([embedding, state], dim=1))
    add_mla(maker, text, f"{key}.self_attn", gains.mla_query, gains.mla_out * gains.mtp)
    add_moe(maker, text, f"{key}.mlp", gains, gains.mlp_out * gains.mtp)


def _mlp_size(text: TextGeometry) -> tuple[int, int]:
    return text.hidden_size, text.intermediate_size


def add_kda(maker: MatrixMaker, text: TextGeometry, key: str, out_gain: float) -> None:
    """A KDA block; q, k, v and their convolutions fused where the family fuses them."""
    hidden, width, heads = text.hidden_size, text.linear_width, text.linear_num_heads
    streams, taps = maker.streams, text.linear_conv_kernel_dim
    convs = [0.5 * streams.normal(f"{key}.{x}_conv1d", width, 1, taps) for x in "qkv"]
    if maker.recipe.fused_kda:
        maker.linear(f"{key}.qkv_proj", Role.KDA_IN, (hidden, 3 * width))
        maker.wide(f"{key}.conv1d.weight", torch.cat(convs))
    else:
        for name, conv in zip("qkv", convs, strict=True):
            maker.linear(f"{key}.{name}_proj", Role.KDA_IN, (hidden, width))
            maker.wide(f"{key}.{name}_conv1d.weight", conv)
    maker.linear(f"{key}.b_proj", Role.PLAIN, (hidden, heads))
    for gate in "fg":
        maker.linear(f"{key}.{gate}_a_proj", Role.PLAIN, (hidden, text.linear_head_dim))
        maker.linear(f"{key}.{gate}_b_proj", Role.PLAIN, (text.linear_head_dim, width))
    maker.wide(f"{key}.A_log", 0.5 * streams.uniform(f"{key}.A_log", heads))
    maker.wide(f"{key}.dt_bias", streams.normal(f"{key}.dt_bias", width) - 3)
    maker.norm(f"{key}.o_norm", text.linear_head_dim)
    maker.linear(f"{key}.o_proj", Role.KDA_OUT, (width, hidden), out_gain)


def add_mla(
    maker: MatrixMaker, text: TextGeometry, key: str, query_gain: float, out_gain: float
) -> None:
    """A sparse NoPE MLA block with its indexer."""
    hidden, heads, latent = text.hidden_size, text.num_attention_heads, text.kv_lora_rank
    query = heads * text.qk_nope_head_dim
    maker.linear(f"{key}.q_a_proj", Role.MLA_Q_A, (hidden, text.q_lora_rank))
    maker.norm(f"{key}.q_a_layernorm", text.q_lora_rank)
    maker.linear(f"{key}.q_b_proj", Role.MLA_Q_B, (text.q_lora_rank, query), query_gain)
    maker.linear(f"{key}.kv_a_proj_with_mqa", Role.MLA_KV_A, (hidden, latent))
    maker.norm(f"{key}.kv_a_layernorm", latent)
    expanded = heads * (text.qk_nope_head_dim + text.v_head_dim)
    maker.linear(f"{key}.kv_b_proj", Role.PLAIN, (latent, expanded))
    maker.linear(f"{key}.o_proj", Role.MLA_OUT, (heads * text.v_head_dim, hidden), out_gain)
    add_indexer(maker, text, f"{key}.indexer")


def add_indexer(maker: MatrixMaker, text: TextGeometry, key: str) -> None:
    """The pooled indexer of one MLA block; only its query projection is ever packed."""
    hidden, heads, width = text.hidden_size, text.index_n_heads, text.index_head_dim
    maker.linear(f"{key}.wq_b", Role.INDEX_Q, (text.q_lora_rank, heads * width))
    maker.linear(f"{key}.wk", Role.PLAIN, (hidden, width))
    maker.linear(f"{key}.weights_proj", Role.PLAIN, (hidden, heads))
    maker.wide(f"{key}.k_norm.weight", 1 + 0.1 * maker.streams.normal(f"{key}.k_norm", width))
    maker.wide(f"{key}.k_norm.bias", 0.1 * maker.streams.normal(f"{key}.k_norm.bias", width))
    bias = maker.streams.normal(f"{key}.ape", text.index_kpool, width)
    maker.wide(f"{key}.index_kpool_compress_ape", 0.5 * bias)
    gate = maker.streams.normal(f"{key}.gate", width, hidden) / hidden**0.5
    maker.plain(f"{key}.index_kpool_compress_gate", gate)


def add_mlp(
    maker: MatrixMaker, key: str, role: Role, size: tuple[int, int], gains: Gains, out_gain: float
) -> None:
    """A gated MLP of `size` (hidden, intermediate).

    Packed gate and up share their input signs; they share the scales, too, where the family does.
    """
    hidden, width = size
    gate = maker.input_signs(f"{key}.gate_proj", hidden)
    up = gate
    if not maker.recipe.shared_gate_scales:
        up = gate.sign() * maker.input_signs(f"{key}.up_proj", hidden).abs()
    maker.linear(f"{key}.gate_proj", role, (hidden, width), gains.gate, gate)
    maker.linear(f"{key}.up_proj", role, (hidden, width), gains.up, up)
    maker.linear(f"{key}.down_proj", role, (width, hidden), out_gain)


def add_moe(
    maker: MatrixMaker, text: TextGeometry, key: str, gains: Gains, out_gain: float
) -> None:
    """Routed experts, the router with its correction bias, and the shared expert."""
    hidden, experts, width = text.hidden_size, text.n_routed_experts, text.moe_intermediate_size
    maker.linear(f"{key}.gate", Role.PLAIN, (hidden, experts), gains.router)
    bias = 0.1 * maker.streams.normal(f"{key}.gate.bias", experts)
    maker.wide(f"{key}.gate.e_score_correction_bias", bias)
    scale = out_gain / text.routed_scaling_factor
    for expert in range(experts):
        module = f"{key}.experts.{expert}"
        add_mlp(maker, module, Role.EXPERT, (hidden, width), gains, scale)
    shared = (hidden, width * text.n_shared_experts)
    add_mlp(maker, f"{key}.shared_experts", Role.SHARED, shared, gains, out_gain)


def add_hyper_connection(maker: MatrixMaker, text: TextGeometry, key: str) -> None:
    """The fp32 stream-mixing weights in front of one block."""
    mult = text.hc_mult
    rows, columns = (2 + mult) * mult, mult * text.hidden_size
    maker.wide(f"{key}_fn", 0.02 * maker.streams.normal(f"{key}_fn", rows, columns))
    maker.wide(f"{key}_base", 0.5 * maker.streams.normal(f"{key}_base", rows))
    maker.wide(f"{key}_scale", 1 + 0.1 * maker.streams.normal(f"{key}_scale", 3))


def vision_shapes(vision: VisionGeometry, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names (without prefix) and shapes of the vision tower's tensors."""
    width, inner, patch = vision.hidden_size, vision.intermediate_size, vision.patch_size
    project, merge = vision.projection_intermediate_size, vision.spatial_merge_size
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (
            width,
            vision.in_channels,
            vision.temporal_patch_size,
            patch,
            patch,
        ),
        "patch_embed.proj.bias": (width,),
        "post_layernorm.weight": (width,),
        "downsample.weight": (hidden, width, merge, merge),
        "downsample.bias": (hidden,),
        "merger.proj.weight": (hidden, hidden),
        "merger.post_projection_norm.weight": (hidden,),
        "merger.post_projection_norm.bias": (hidden,),
        "merger.gate_proj.weight": (project, hidden),
        "merger.up_proj.weight": (project, hidden),
        "merger.down_proj.weight": (hidden, project),
    }
    for block in range(vision.depth):
        linear = {
            "attn.qkv": (3 * width, width),
            "attn.proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        for name, (rows, columns) in linear.items():
            shapes[f"blocks.{block}.{name}.weight"] = (rows, columns)
            shapes[f"blocks.{block}.{name}.bias"] = (rows,)
        for name, size in (("norm1", width), ("norm2", width)):
            shapes[f"blocks.{block}.{name}.weight"] = (size,)
        for name in ("attn.q_norm", "attn.k_norm"):
            shapes[f"blocks.{block}.{name}.weight"] = (width // vision.num_heads,)
    return shapes


def add_vision(maker: MatrixMaker, vision: VisionGeometry, hidden: int) -> None:
    """The vision tower, never packed."""
    for name, shape in vision_shapes(vision, hidden).items():
        key = f"model.visual.{name}"
        values = maker.streams.normal(key, *shape)
        if "norm" in name and name.endswith("weight"):
            maker.plain(key, 1 + 0.1 * values)
        else:
            fan_in = values[0].numel()
            maker.plain(key, values / fan_in**0.5 if len(shape) > 1 else 0.1 * values)
