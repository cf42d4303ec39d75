"""The dims of GLM-5.3-Flash, whole or as one tensor-parallel rank sees them.

Sources: transformers' `Glm5NextTextConfig` and the published config (16 index heads). The drafter's
dims are an assumption: five layers of the target's width, 32 query and 8 key/value heads, which is
what the public 0.96 GiB at six bits allows.

What must stay true: a rank of `rank_geometry` computes what a rank of a real launch computes per
token, without the collectives.
"""

from __future__ import annotations

from dataclasses import replace

from glm_exl3.ref.tiny.geometry import DraftGeometry, Geometry, TextGeometry, geometry

LAYERS = 45
DENSE_LAYERS = 3
MLA_EVERY = 4
DRAFT_WINDOW = 2048


def _kinds(layers: int) -> tuple[str, ...]:
    mla = MLA_EVERY - 1
    return tuple(
        "deepseek_sparse_attention" if i % MLA_EVERY == mla else "linear_attention"
        for i in range(layers)
    )


def real_geometry(layers: int = LAYERS, experts: int = 288) -> Geometry:
    """The published model cut to its first `layers` layers and `experts` experts."""
    text = TextGeometry(
        vocab_size=154880,
        hidden_size=4096,
        num_hidden_layers=layers,
        layer_types=_kinds(layers),
        mlp_layer_types=tuple("dense" if i < DENSE_LAYERS else "sparse" for i in range(layers)),
        intermediate_size=12288,
        moe_intermediate_size=2048,
        n_routed_experts=experts,
        num_experts_per_tok=8,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        swiglu_limit=10.0,
        num_attention_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=256,
        v_head_dim=256,
        index_n_heads=16,
        index_head_dim=128,
        index_topk=2048,
        index_kpool=16,
        linear_num_heads=64,
        linear_head_dim=128,
        linear_conv_kernel_dim=4,
        linear_lower_bound=-5.0,
        hc_mult=4,
        hc_eps=1e-6,
        hc_sinkhorn_iters=20,
        num_nextn_predict_layers=1,
        max_position_embeddings=1048576,
        rms_norm_eps=1e-5,
    )
    taps = tuple(round(i * (layers - 2) / 4) for i in range(5)) if layers >= 6 else (0, layers - 1)
    draft = DraftGeometry(
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        target_layer_ids=taps,
        conv_kernel_size=3,
        conv_group_size=32,
        selector_rank=256,
        selector_top_k=8,
        block_size=8,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
    )
    return Geometry(text, geometry().vision, draft)


def rank_geometry(whole: Geometry, ranks: int) -> Geometry:
    """What one of `ranks` holds: heads and widths divided, everything replicated as it is.

    The drafter stays whole. Raises ValueError when a width does not divide.
    """
    text = whole.text
    cut = (
        "vocab_size", "intermediate_size", "moe_intermediate_size",
        "num_attention_heads", "linear_num_heads",
    )  # fmt: skip
    for name in cut:
        if getattr(text, name) % ranks:
            raise ValueError(f"{name}={getattr(text, name)} does not divide by {ranks}")
    shares = {name: getattr(text, name) // ranks for name in cut}
    return Geometry(replace(text, **shares), whole.vision, whole.draft)
