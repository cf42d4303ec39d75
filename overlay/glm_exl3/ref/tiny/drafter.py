"""The tensors of the DFlash2 drafter that fits a tiny target."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from glm_exl3.ref.tiny import configs
from glm_exl3.ref.tiny.geometry import Geometry
from glm_exl3.ref.tiny.matrices import MatrixMaker
from glm_exl3.ref.tiny.recipe import DRAFT_BF16, DRAFT_EXL3, RandomStreams, Role

KERNEL_SIDES = 2


def drafter_tensors(
    geometry: Geometry, seed: int, *, packed: bool
) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """State dict and `quantization_config` (None for BF16) of the drafter."""
    recipe = DRAFT_EXL3 if packed else DRAFT_BF16
    maker = MatrixMaker(RandomStreams(seed), recipe)
    hidden, draft = geometry.text.hidden_size, geometry.draft
    maker.linear("fc", Role.DRAFT, (hidden * len(draft.target_layer_ids), hidden))
    maker.norm("hidden_norm", hidden)
    maker.norm("norm", hidden)
    for layer in range(draft.num_hidden_layers):
        key = f"layers.{layer}"
        width = draft.intermediate_size
        maker.linear(f"{key}.self_attn.q_proj", Role.DRAFT, (hidden, draft.query_width))
        maker.linear(f"{key}.self_attn.k_proj", Role.DRAFT, (hidden, draft.key_width))
        maker.linear(f"{key}.self_attn.v_proj", Role.DRAFT, (hidden, draft.key_width))
        maker.linear(f"{key}.self_attn.o_proj", Role.DRAFT, (draft.query_width, hidden))
        maker.norm(f"{key}.self_attn.q_norm", draft.head_dim)
        maker.norm(f"{key}.self_attn.k_norm", draft.head_dim)
        maker.linear(f"{key}.mlp.gate_proj", Role.DRAFT, (hidden, width))
        maker.linear(f"{key}.mlp.up_proj", Role.DRAFT, (hidden, width))
        maker.linear(f"{key}.mlp.down_proj", Role.DRAFT, (width, hidden))
        maker.norm(f"{key}.input_layernorm", hidden)
        maker.norm(f"{key}.post_attention_layernorm", hidden)
        for conv in ("attention_conv", "mlp_conv"):
            base = 0.05 * maker.streams.normal(
                f"{key}.{conv}", KERNEL_SIDES, draft.conv_kernel_size, hidden
            )
            base[:, 0] += 1
            maker.plain(f"{key}.{conv}.base_kernel", base)
            kernels = KERNEL_SIDES * draft.conv_kernel_size * (hidden // draft.conv_group_size)
            maker.linear(f"{key}.{conv}.kernel_projection", Role.PLAIN, (hidden, kernels), 0.05)
    rank, vocab = draft.selector_rank, geometry.text.vocab_size
    for table in ("predecessor", "successor"):
        name = f"candidate_selector.{table}_codebook"
        maker.plain(name, maker.streams.normal(name, vocab, rank) / rank**0.5)
    maker.linear("candidate_selector.hidden_projection", Role.PLAIN, (hidden, rank))
    config = configs.quantization(recipe, maker.tensors) if packed else None
    return maker.tensors, config
