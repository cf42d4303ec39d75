"""A prefill step of a KDA layer whose convolutions leave q, k and v dense.

FlashKDA reads dense q, k and v. vLLM convolves all three at once and copies each out of the wide
result; here every one is convolved into a tensor of its own, which is what the copies held: a
channel's convolution knows no other channel. Projections, norm and output stay the parent's.

Steps that also verify drafts are left to the parent, and so is what a graph is captured from:
piecewise graphs replay the parent's own break.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.models.glm5next.common.kda import (
    causal_conv1d_fn,
    gather_initial_states,
    scatter_states,
)
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from glm_exl3.fused import kda_step

FEWEST_TOKENS = 1024  # copies of fewer cost no more than two further launches


def prefill_metadata(prefix: str) -> GDNAttentionMetadata | None:
    """The layer's metadata if this step is eager, prefills and verifies no drafts; else None."""
    metadata = kda_step.metadata_of(prefix)
    if metadata is None or BreakableCUDAGraphCapture.current() is not None:
        return None
    plain = metadata.spec_sequence_masks is None and metadata.num_prefills > 0
    return metadata if plain else None


def attend(
    layer: Any, qkv: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, core: torch.Tensor
) -> bool:
    """Write the attention of a step into `core`; False, with nothing done, when the parent has to.

    qkv `[T, 3P]`, gate `[1, T, H, D]` and beta `[1, T, H]` as projected; core `[1, T, H, D]`. The
    states of the step's requests advance in the layer's cache.
    """
    metadata = prefill_metadata(layer.prefix)
    if metadata is None or layer.kda_prefill_backend != "flashkda":
        return False
    count, slots = metadata.num_actual_tokens, metadata.non_spec_state_indices_tensor
    if count < FEWEST_TOKENS:
        return False
    conv_state, recurrent_state = layer.kv_cache
    if not layer._conv_state_dim_first:
        conv_state = conv_state.transpose(-1, -2)
    q, k, v = convolved(layer, qkv[:count], conv_state, metadata)
    initial = gather_initial_states(recurrent_state, slots, metadata.has_initial_state)
    _, final = layer._flashkda_prefill(
        q=q,
        k=k,
        v=v,
        g=gate[:, :count],
        beta=beta[:, :count],
        initial_state=initial,
        cu_seqlens=metadata.non_spec_query_start_loc,
        out=core[:, :count],
        checkpoint=metadata.checkpoint,
        raw_qkv=qkv[:count],
        conv_state=conv_state,
        recurrent_state=recurrent_state,
    )
    scatter_states(recurrent_state, final, slots)
    return True


def convolved(
    layer: Any, qkv: torch.Tensor, conv_state: torch.Tensor, metadata: GDNAttentionMetadata
) -> list[torch.Tensor]:
    """q, k and v, each dense `[1, T, H, D]`, from qkv `[T, 3P]`; state `[blocks, 3P, 3]` advances.

    The rows of qkv may be parts of wider ones.
    """
    width = layer.local_projection_size
    convs = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
    parts, states = qkv.split(width, dim=-1), conv_state.split(width, dim=1)
    found = []
    for part, state, conv in zip(parts, states, convs, strict=True):
        out = causal_conv1d_fn(
            part.transpose(0, 1),
            conv.weight.view(conv.weight.size(0), conv.weight.size(2)),
            conv.bias,
            activation="silu",
            conv_states=state,
            has_initial_state=metadata.has_initial_state,
            cache_indices=metadata.non_spec_state_indices_tensor,
            query_start_loc=metadata.non_spec_query_start_loc,
            metadata=metadata,
        )
        found.append(out.transpose(0, 1).reshape(1, -1, layer.local_num_heads, layer.head_dim))
    return found
