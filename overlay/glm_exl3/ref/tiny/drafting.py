"""DFlash2 and MTP drafting re-stated in torch, to measure acceptance without an engine.

What: `DFlash2` proposes the tokens behind one anchor from the target's tapped states; `mtp_drafts`
gives the first draft of the MTP layer at every position of a text. Why re-stated: whether drafts
are accepted is a property of the checkpoint and has to hold before any engine loads it.

What must stay true: this follows the definition of vLLM 0.33.0 (context keys and values from the
combined taps, one non-causal block of anchor and masks, convolutions inside the block, greedy walk
over the selector's scores), in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm_exl3.ref.tiny.geometry import DraftGeometry, Geometry
from glm_exl3.ref.tiny.target import PREFIX
from glm_exl3.ref.tiny.tokenizer import MASK_ENTRY, token_id


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of halves; x `[T, heads, D]`, positions `[T]`."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None, None].float() * frequency
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def grouped_conv(x: Tensor, delta: Tensor, base: Tensor, group: int) -> Tensor:
    """Causal convolution of a block `[B, H]`: delta `[B, taps, H/group]`, base `[taps, H]`."""
    kernels = base + delta.repeat_interleave(group, dim=-1)
    out = kernels[:, 0] * x
    for tap in range(1, base.shape[0]):
        shifted = F.pad(x[:-tap], (0, 0, tap, 0))
        out = out + kernels[:, tap] * shifted
    return out


class DFlash2:
    """The drafter of a tiny target on dense weights under their checkpoint names."""

    def __init__(
        self,
        geometry: Geometry,
        weights: Mapping[str, Tensor],
        embeddings: Tensor,
        head: Tensor,
    ) -> None:
        self.draft: DraftGeometry = geometry.draft
        self.weights = {name: tensor.float() for name, tensor in weights.items()}
        self.embeddings = embeddings.float()
        self.head = head.float()

    def linear(self, module: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{module}.weight"].T

    def norm(self, module: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{module}.weight"], self.draft.rms_norm_eps)

    def heads(self, layer: int, name: str, x: Tensor, positions: Tensor) -> Tensor:
        """Normed and rotated queries or keys `[T, heads, D]`; values as they are."""
        key = f"layers.{layer}.self_attn"
        split = self.linear(f"{key}.{name}_proj", x).unflatten(-1, (-1, self.draft.head_dim))
        if name == "v":
            return split
        return rotate(self.norm(f"{key}.{name}_norm", split), positions, self.draft.rope_theta)

    def attention(self, layer: int, x: Tensor, context: Tensor, start: int) -> Tensor:
        """Non-causal attention of the block `x` `[B, H]` at `start` over context and block."""
        before = torch.arange(context.shape[0])
        here = torch.arange(start, start + x.shape[0])
        queries = self.heads(layer, "q", x, here)
        keys, values = (
            torch.cat([self.heads(layer, n, context, before), self.heads(layer, n, x, here)])
            for n in ("k", "v")
        )
        repeat = queries.shape[1] // keys.shape[1]
        keys, values = (t.repeat_interleave(repeat, dim=1) for t in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.draft.head_dim**-0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return self.linear(f"layers.{layer}.self_attn.o_proj", mixed.flatten(1))

    def convolved(self, module: str, x: Tensor, block: Any) -> Tensor:
        """`block` between the two convolutions of `module`."""
        kernels = self.linear(f"{module}.kernel_projection", x)
        delta = kernels.view(x.shape[0], 2, self.draft.conv_kernel_size, -1)
        base, group = self.weights[f"{module}.base_kernel"], self.draft.conv_group_size
        x = block(grouped_conv(x, delta[:, 0], base[0], group))
        return grouped_conv(x, delta[:, 1], base[1], group)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        key = f"layers.{layer}.mlp"
        gated = F.silu(self.linear(f"{key}.gate_proj", x)) * self.linear(f"{key}.up_proj", x)
        return self.linear(f"{key}.down_proj", gated)

    def hidden(self, anchor: int, taps: Tensor, count: int) -> Tensor:
        """Final states `[count, H]` of the mask positions behind `anchor`."""
        context = self.norm("hidden_norm", self.linear("fc", taps))
        x = self.embeddings[[anchor] + [token_id(MASK_ENTRY)] * count]
        start = taps.shape[0]
        for layer in range(self.draft.num_hidden_layers):
            key = f"layers.{layer}"

            def attend(y: Tensor, layer: int = layer) -> Tensor:
                return self.attention(layer, y, context, start)

            def feed(y: Tensor, layer: int = layer) -> Tensor:
                return self.mlp(layer, y)

            normed = self.norm(f"{key}.input_layernorm", x)
            x = x + self.convolved(f"{key}.attention_conv", normed, attend)
            normed = self.norm(f"{key}.post_attention_layernorm", x)
            x = x + self.convolved(f"{key}.mlp_conv", normed, feed)
        return self.norm("norm", x)[1:]

    def propose(self, anchor: int, taps: Tensor, count: int) -> list[int]:
        """Greedy drafts behind `anchor`; taps `[context, taps * H]` of the tokens before it."""
        hidden = self.hidden(anchor, taps, count)
        unary, candidates = (hidden @ self.head.T).topk(self.draft.selector_top_k)
        key = "candidate_selector"
        before = self.weights[f"{key}.predecessor_codebook"]
        behind = self.weights[f"{key}.successor_codebook"]
        gates = self.linear(f"{key}.hidden_projection", hidden)
        tokens: list[int] = []
        for step in range(count):
            previous = tokens[-1] if tokens else anchor
            scores = unary[step] + behind[candidates[step]] @ (before[previous] * gates[step])
            tokens.append(int(candidates[step][scores.argmax()]))
        return tokens


def mtp_drafts(
    geometry: Geometry,
    weights: Mapping[str, Tensor],
    block: Any,
    tokens: Sequence[int],
    hidden: Tensor,
) -> list[int]:
    """First MTP draft at every position i: a guess of token i + 2 from token i + 1 and state i.

    `weights` are dense and in the target's names, hidden `[T, H]` the target's normed states,
    `block(x) -> x` the attention and MoE of the MTP layer on the residual stream.
    """
    text = geometry.text
    key = f"{PREFIX}.layers.{text.mtp_layer}"

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, weights[f"{key}.{name}.weight"].float(), text.rms_norm_eps)

    embedded = weights[f"{PREFIX}.embed_tokens.weight"].float()[list(tokens[1:])]
    embedded[0] = 0
    states = hidden[: len(tokens) - 1].float()
    joined = torch.cat([norm("enorm", embedded), norm("hnorm", states)], dim=-1)
    x = joined @ weights[f"{key}.eh_proj.weight"].float().T
    logits = norm("shared_head.norm", block(x)) @ weights["lm_head.weight"].float().T
    return [int(token) for token in logits.argmax(-1)]


def accepted(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """How many drafts in a row are right, from the first one on."""
    count = 0
    for draft, token in zip(drafts, truth, strict=False):
        if draft != token:
            break
        count += 1
    return count
