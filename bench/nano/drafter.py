"""The DFlash2 drafter for training: a block of masked tokens read from taps of the target.

Definition: vLLM's `qwen3_dflash2` (layers, grouped convolutions, candidate selector) with its
names, so that `state_dict()` is the checkpoint. A step drafts `BLOCK - 1` tokens at once: the block
is the anchor (the last sampled token) and mask tokens; keys and values of the context come from the
target's hidden states through `fc`, those of the block from the block itself; within the block
attention is not causal. The selector then scores pairs of neighbouring candidates, and a greedy
walk picks the draft. Embedding and head are the target's.

Many anchors of one sequence are trained at once: the context's keys and values are shared and a
mask shows each block its own past.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm_exl3.ref.tiny.geometry import DraftGeometry, Geometry
from glm_exl3.ref.tiny.tokenizer import MASK_ENTRY, token_id
from nano.layers import RmsNorm, linear

BLOCK = 8


@dataclass(frozen=True)
class DrafterGeometry:
    """The drafter's dimensions and what it takes from the target."""

    hidden_size: int
    vocab_size: int
    mask_token_id: int
    draft: DraftGeometry

    @classmethod
    def of(cls, geometry: Geometry) -> DrafterGeometry:
        """The drafter that belongs to a geometry."""
        text = geometry.text
        return cls(text.hidden_size, text.vocab_size, token_id(MASK_ENTRY), geometry.draft)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding (half-split form) of `[B, heads, N, D]` at positions `[N]`."""
    half = x.shape[-1] // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = positions[:, None].float() * theta**-exponent
    cosine, sine = angle.cos(), angle.sin()
    first, second = x.float().split(half, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.to(x.dtype)


class GroupedConv(nn.Module):
    """Convolution over the positions of a block with kernels that depend on the input."""

    def __init__(self, geometry: DrafterGeometry) -> None:
        super().__init__()
        self.taps, self.size = geometry.draft.conv_kernel_size, geometry.draft.conv_group_size
        hidden = geometry.hidden_size
        base = torch.zeros(2, self.taps, hidden)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = linear(hidden, 2 * self.taps * (hidden // self.size))
        nn.init.normal_(self.kernel_projection.weight, std=0.01)

    def coefficients(self, x: Tensor) -> Tensor:
        """`[B, A, 8, 2, taps, groups]` for x `[B, A, 8, H]`."""
        return self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))

    def convolve(self, x: Tensor, delta: Tensor, side: int) -> Tensor:
        """Sum over taps of (base + delta) times the token that many places earlier."""
        kernel = self.base_kernel[side].to(x.dtype).unflatten(-1, (-1, self.size))
        coefficient = kernel + delta[..., side, :, :, None]
        groups = x.unflatten(-1, (-1, self.size))
        out = coefficient[..., 0, :, :] * groups
        for tap in range(1, self.taps):
            shifted = F.pad(groups[:, :, :-tap], (0, 0, 0, 0, tap, 0))
            out = out + coefficient[..., tap, :, :] * shifted
        return out.flatten(-2)


class DraftAttention(nn.Module):
    """Grouped-query attention of blocks over the context's and their own keys."""

    def __init__(self, geometry: DrafterGeometry) -> None:
        super().__init__()
        self.heads, self.kv_heads = (
            geometry.draft.num_attention_heads,
            geometry.draft.num_key_value_heads,
        )
        self.width, self.theta = geometry.draft.head_dim, geometry.draft.rope_theta
        hidden = geometry.hidden_size
        self.q_proj = linear(hidden, self.heads * self.width)
        self.k_proj = linear(hidden, self.kv_heads * self.width)
        self.v_proj = linear(hidden, self.kv_heads * self.width)
        self.o_proj = linear(self.heads * self.width, hidden)
        self.q_norm = RmsNorm(self.width, geometry.draft.rms_norm_eps)
        self.k_norm = RmsNorm(self.width, geometry.draft.rms_norm_eps)

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values `[B, kv_heads, N, D]` of x `[B, N, H]`."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.width))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.width)).transpose(1, 2)
        return rotate(k, positions, self.theta), v

    def forward(
        self, x: Tensor, context: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Output for x `[B, Q, H]` (flattened blocks), context `[B, T, H]`, mask `[Q, T + Q]`.

        `positions` are those of the queries and of the context.
        """
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.width))).transpose(1, 2)
        q = rotate(q, positions[0], self.theta)
        own, past = self.keys(x, positions[0]), self.keys(context, positions[1])
        k, v = (torch.cat([before, mine], dim=2) for before, mine in zip(past, own, strict=True))
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class DraftMlp(nn.Module):
    """Plain SwiGLU."""

    def __init__(self, geometry: DrafterGeometry) -> None:
        super().__init__()
        self.gate_proj = linear(geometry.hidden_size, geometry.draft.intermediate_size)
        self.up_proj = linear(geometry.hidden_size, geometry.draft.intermediate_size)
        self.down_proj = linear(geometry.draft.intermediate_size, geometry.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Attention and MLP, each between two grouped convolutions."""

    def __init__(self, geometry: DrafterGeometry) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(geometry.hidden_size, geometry.draft.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(geometry.hidden_size, geometry.draft.rms_norm_eps)
        self.self_attn, self.mlp = DraftAttention(geometry), DraftMlp(geometry)
        self.attention_conv, self.mlp_conv = GroupedConv(geometry), GroupedConv(geometry)

    def forward(
        self, x: Tensor, context: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """x `[B, A, 8, H]`."""
        normed = self.input_layernorm(x)
        delta = self.attention_conv.coefficients(normed)
        inner = self.attention_conv.convolve(normed, delta, 0)
        out = self.self_attn(inner.flatten(1, 2), context, positions, mask).view_as(x)
        x = x + self.attention_conv.convolve(out, delta, 1)
        normed = self.post_attention_layernorm(x)
        delta = self.mlp_conv.coefficients(normed)
        out = self.mlp(self.mlp_conv.convolve(normed, delta, 0))
        return x + self.mlp_conv.convolve(out, delta, 1)


class CandidateSelector(nn.Module):
    """Scores of (previous token, token) pairs, conditioned on the position's hidden state."""

    def __init__(self, geometry: DrafterGeometry) -> None:
        super().__init__()
        size = (geometry.vocab_size, geometry.draft.selector_rank)
        self.predecessor_codebook = nn.Parameter(torch.randn(size) * 0.3)
        self.successor_codebook = nn.Parameter(torch.randn(size) * 0.3)
        self.hidden_projection = linear(geometry.hidden_size, geometry.draft.selector_rank)

    def edges(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Pair scores `[..., V]` of all successors for hidden `[..., H]`, previous `[...]`."""
        left = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        return left @ self.successor_codebook.to(left.dtype).T


class Drafter(nn.Module):
    """The drafter without the embedding and head it shares with the target."""

    def __init__(self, geometry: DrafterGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        hidden, eps = geometry.hidden_size, geometry.draft.rms_norm_eps
        self.fc = linear(hidden * len(geometry.draft.target_layer_ids), hidden)
        self.hidden_norm, self.norm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.layers = nn.ModuleList(
            DraftLayer(geometry) for _ in range(geometry.draft.num_hidden_layers)
        )
        self.candidate_selector = CandidateSelector(geometry)

    def read(self, taps: list[Tensor]) -> list[Tensor]:
        """Of the target's hidden states before and after each layer, those it takes."""
        return [taps[index + 1] for index in self.geometry.draft.target_layer_ids]

    def forward(
        self, taps: list[Tensor], tokens: Tensor, anchors: Tensor, embedding: Tensor
    ) -> Tensor:
        """Normed hidden `[B, A, 8, H]` of the blocks that begin at `anchors` `[A]`.

        `taps` are the hidden states `[B, T, H]` that `read` picks, tokens `[B, T]`.
        """
        context = self.hidden_norm(self.fc(torch.cat(taps, dim=-1)))
        shape = tokens.shape[0], anchors.numel(), BLOCK
        blocks = torch.full(shape, self.geometry.mask_token_id, device=tokens.device)
        blocks[:, :, 0] = tokens[:, anchors]
        x = embedding[blocks].to(context.dtype)
        place = (anchors[:, None] + torch.arange(BLOCK, device=tokens.device)).flatten()
        past = torch.arange(tokens.shape[1], device=tokens.device)
        mask = block_mask(anchors, past)
        for layer in self.layers:
            x = layer(x, context, (place, past), mask)
        return self.norm(x)


def block_mask(anchors: Tensor, past: Tensor) -> Tensor:
    """Bool `[A * 8, T + A * 8]`: a block sees the context before its anchor and itself."""
    owner = torch.arange(anchors.numel(), device=anchors.device).repeat_interleave(BLOCK)
    before = past[None, :] < anchors[owner][:, None]
    return torch.cat([before, owner[:, None] == owner[None, :]], dim=1)


def draft_losses(
    drafter: Drafter, hidden: Tensor, tokens: Tensor, anchors: Tensor, teacher: Tensor, head: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross entropy to the teacher without and with the pair scores, weighted towards early drafts.

    hidden `[B, A, 8, H]`; teacher logits `[B, A, 7, V]` are the target's for the same positions.
    """
    offsets = anchors[:, None] + torch.arange(BLOCK - 1, device=anchors.device)
    states = hidden[:, :, 1:]
    unary = F.linear(states, head.to(states.dtype)).float()
    paired = unary + drafter.candidate_selector.edges(states, tokens[:, offsets]).float()
    target = teacher.float().softmax(-1)
    fade = 0.8 ** torch.arange(BLOCK - 1, device=anchors.device)
    losses = [
        (-(target * logits.log_softmax(-1)).sum(-1) * fade).mean() for logits in (unary, paired)
    ]
    return losses[0], losses[1]


@torch.no_grad()
def walk(drafter: Drafter, hidden: Tensor, anchor_tokens: Tensor, head: Tensor) -> Tensor:
    """Greedy drafts `[B, A, 7]`: best candidates, then the best path by pair scores."""
    states = hidden[:, :, 1:]
    logits = F.linear(states, head.to(states.dtype)).float()
    best = logits.topk(drafter.geometry.draft.selector_top_k, dim=-1)
    previous, drafts = anchor_tokens, []
    for step in range(BLOCK - 1):
        edge = drafter.candidate_selector.edges(states[:, :, step], previous).float()
        score = best.values[:, :, step] + edge.gather(-1, best.indices[:, :, step])
        previous = best.indices[:, :, step].gather(-1, score.argmax(-1, keepdim=True))[..., 0]
        drafts.append(previous)
    return torch.stack(drafts, -1)
