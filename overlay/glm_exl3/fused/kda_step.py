"""A plain decode step of a KDA layer around the fused inputs.

Only steps that decode one token per request are taken, and only where the branch is decided at
run time or in a full graph: a piecewise graph is captured without knowing which requests it will
serve, so there the parent's own path stays.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.models.glm5next.common.kda import fused_recurrent_kda
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from glm_exl3.fused import kda_inputs


def metadata_of(prefix: str) -> GDNAttentionMetadata | None:
    """The layer's metadata of this step; None where a step has none, as in a run for memory."""
    every = get_forward_context().attn_metadata
    metadata = every.get(prefix) if isinstance(every, dict) else None
    return metadata if isinstance(metadata, GDNAttentionMetadata) else None


def decode_metadata(prefix: str) -> GDNAttentionMetadata | None:
    """The layer's metadata if this step only decodes, one token per request; else None."""
    metadata = metadata_of(prefix)
    if metadata is None:
        return None
    capturing = BreakableCUDAGraphCapture.current() is not None
    if capturing and get_forward_context().cudagraph_runtime_mode != CUDAGraphMode.FULL:
        return None
    plain = metadata.num_prefills == 0 and metadata.spec_sequence_masks is None
    whole = metadata.num_decodes == metadata.num_actual_tokens > 0
    return metadata if plain and whole else None


def projections(layer: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's qkv `[T, 3P]` and what lies behind it `[T, heads + 2 * width]`."""
    loaded = getattr(layer.in_proj_qkvbfg_a, "exl3", None)
    width = 3 * layer.local_projection_size
    if loaded is not None and not loaded.together and loaded.terms[0].width == width:
        first, *rest = loaded.products(hidden)
        return first, rest[0] if len(rest) == 1 else torch.cat(rest, dim=-1)
    projected = layer.in_proj_qkvbfg_a(hidden)[0]
    return projected[:, :width], projected[:, width:]


def step(layer: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """The layer's output for a decode step, or None when the parent has to do it."""
    metadata = decode_metadata(layer.prefix)
    if metadata is None or hidden.shape[0] > kda_inputs.MAX_TOKENS:
        return None
    conv_weight, weights = merged_conv(layer), (layer.f_b_proj.weight, layer.g_b_proj.weight)
    qkv, rest = projections(layer, hidden)
    count = metadata.num_decodes
    if not kda_inputs.takes(qkv, weights[0], conv_weight):
        return None
    heads, width = layer.local_num_heads, layer.head_dim
    beta, f_low, g_low = rest.split([heads, width, width], dim=-1)
    conv_state, recurrent_state = layer.kv_cache
    if not layer._conv_state_dim_first:
        conv_state = conv_state.transpose(-1, -2)
    slots = metadata.non_spec_state_indices_tensor
    mixed, gate, out_gate = kda_inputs.inputs(
        qkv[:count], conv_state, slots[:count], conv_weight, (f_low, g_low), weights
    )
    core = torch.empty(1, hidden.shape[0], heads, width, dtype=hidden.dtype, device=hidden.device)
    q, k, v = (part.reshape(1, count, heads, width) for part in mixed.chunk(3, dim=-1))
    fused_recurrent_kda(
        q=q,
        k=k,
        v=v,
        g=gate[:count].view(1, count, heads, width),
        beta=beta[:count].unsqueeze(0),
        initial_state=recurrent_state,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=metadata.non_spec_query_start_loc[: count + 1],
        ssm_state_indices=slots,
        out=core[0, :count].unsqueeze(0),
        sigmoid_beta=True,
        a_log=layer.A_log,
        g_bias=layer.dt_bias,
        compute_gate=True,
        lower_bound=layer.kda_lower_bound,
    )
    normed = layer.o_norm(core, out_gate.view(-1, heads, width))
    output: torch.Tensor = layer.o_proj(normed.reshape(hidden.shape[0], -1))[0]
    return output


def merged_conv(layer: Any) -> torch.Tensor:
    """The convolutions of q, k and v as one fp32 `[3P, 4]`, kept where the parent keeps it."""
    if layer._merged_conv_weight is None:
        parts = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
        weights = [part.weight.view(part.weight.size(0), part.weight.size(2)) for part in parts]
        layer._merged_conv_weight = torch.cat(weights, dim=0).contiguous()
    merged: torch.Tensor = layer._merged_conv_weight
    return merged
