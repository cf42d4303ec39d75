"""The miniature as a whole: hyper-connected layers, language-model head, multi-token predictor.

`Nano` is the target, `Predictor` the MTP block that drafts from the target's last hidden state. The
predictor is trained on detached hidden states, so the target does not depend on it. Tensor names of
`state_dict()` are those of the checkpoint below `model.language_model.` (`layers.N...`, `norm`,
`embed_tokens`) except for the stacked experts; `nano.export` renames them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nano.geometry import TextGeometry
from nano.layers import KdaAttention, MlaAttention, Mlp, Moe, RmsNorm, Selection, linear


def hyper_weights(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: tuple[float, float], rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapsed input `[B, T, H]`, expansion weights `[B, T, N, 1]` and mixing matrix, transposed.

    streams `[B, T, N, H]`; `eps` is (RMS eps, Sinkhorn eps).
    """
    count = streams.shape[2]
    flat = streams.flatten(2).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps[0])
    raw = F.linear(flat, fn)
    pre, post, comb = raw.split([count, count, count * count], dim=-1)
    pre_base, post_base, comb_base = base.split([count, count, count * count])
    pre = torch.sigmoid(pre * scale[0] + pre_base) + eps[1]
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = (comb * scale[2] + comb_base).unflatten(-1, (count, count)).softmax(-1) + eps[1]
    comb = comb / (comb.sum(-2, keepdim=True) + eps[1])
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps[1])
        comb = comb / (comb.sum(-2, keepdim=True) + eps[1])
    collapsed = (pre[..., None] * streams).sum(2).to(streams.dtype)
    return collapsed, post[..., None], comb.transpose(-1, -2)


def hyper_mix(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams: the block's output expanded, plus the old streams mixed."""
    kind = streams.dtype
    mixed = (comb[..., None] * streams[:, :, None].float()).sum(3)
    return (post * out[:, :, None].float() + mixed).to(kind)


def token_losses(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy per token, fp32 `[N]`, for hidden `[N, H]`."""
    return F.cross_entropy(
        F.linear(hidden, head.to(hidden.dtype)).float(), labels, reduction="none"
    )


class HyperConnection(nn.Module):
    """Weights of one hyper-connection (fp32); its maths is `hyper_weights` and `hyper_mix`."""

    def __init__(self, geometry: TextGeometry) -> None:
        super().__init__()
        count = geometry.hc_mult
        self.fn = nn.Parameter(
            torch.randn((2 + count) * count, count * geometry.hidden_size) * 0.02
        )
        base = torch.zeros((2 + count) * count)
        base[:count] = -1.0
        base[2 * count :] = 2.0 * torch.eye(count).flatten()
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.full((3,), 0.3))
        self.eps = (geometry.rms_norm_eps, geometry.hc_eps)
        self.rounds = geometry.hc_sinkhorn_iters

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(streams.device.type, enabled=False):
            return hyper_weights(streams, self.fn, self.base, self.scale, self.eps, self.rounds)


class Layer(nn.Module):
    """One decoder layer: attention and feed-forward, each inside a hyper-connection."""

    def __init__(self, geometry: TextGeometry, index: int) -> None:
        super().__init__()
        self.linear_attention = geometry.is_linear(index)
        self.self_attn = KdaAttention(geometry) if self.linear_attention else MlaAttention(geometry)
        sparse = geometry.is_sparse_mlp(index)
        self.mlp = Moe(geometry) if sparse else Mlp(geometry, geometry.intermediate_size)
        self.input_layernorm = RmsNorm(geometry.hidden_size, geometry.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(geometry.hidden_size, geometry.rms_norm_eps)
        self.attn_hc, self.ffn_hc = HyperConnection(geometry), HyperConnection(geometry)

    def forward(self, streams: Tensor, selection: Selection) -> Tensor:
        collapsed, post, comb = self.attn_hc(streams)
        x = self.input_layernorm(collapsed)
        out = self.self_attn(x) if self.linear_attention else self.self_attn(x, selection)
        streams = hyper_mix(streams, out, post, comb)
        collapsed, post, comb = self.ffn_hc(streams)
        out = self.mlp(self.post_attention_layernorm(collapsed))
        return hyper_mix(streams, out, post, comb)


class Outputs(NamedTuple):
    """Normed last hidden `[B, T, H]` and the mean of the streams before and after each layer."""

    hidden: Tensor
    taps: list[Tensor]


class Nano(nn.Module):
    """The target model."""

    def __init__(self, geometry: TextGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.embed_tokens = nn.Embedding(geometry.vocab_size, geometry.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(geometry, n) for n in range(geometry.num_hidden_layers))
        self.norm = RmsNorm(geometry.hidden_size, geometry.rms_norm_eps)
        self.lm_head = linear(geometry.hidden_size, geometry.vocab_size)

    def forward(self, tokens: Tensor, selection: Selection, want_taps: bool = False) -> Outputs:
        device = tokens.device.type
        kind = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        )
        embedded = self.embed_tokens(tokens).to(kind)
        streams = embedded[:, :, None].expand(-1, -1, self.geometry.hc_mult, -1).contiguous()
        taps = [embedded] if want_taps else []
        for layer in self.layers:
            streams = layer(streams, selection)
            if want_taps:
                taps.append(streams.mean(2))
        return Outputs(self.norm(streams.mean(2)), taps)

    def moes(self) -> list[Moe]:
        """The layers' routed blocks."""
        return [module for module in self.modules() if isinstance(module, Moe)]


class Predictor(nn.Module):
    """The multi-token predictor: one MLA + MoE block with plain residuals."""

    def __init__(self, geometry: TextGeometry) -> None:
        super().__init__()
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.enorm, self.hnorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.eh_proj = linear(2 * hidden, hidden)
        self.input_layernorm, self.post_attention_layernorm = (
            RmsNorm(hidden, eps),
            RmsNorm(hidden, eps),
        )
        self.self_attn = MlaAttention(geometry)
        self.mlp = Moe(geometry)
        self.shared_head_norm = RmsNorm(hidden, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, selection: Selection) -> Tensor:
        """Normed hidden `[B, T, H]` that predicts the token after `embedded`'s.

        Position t takes the target's (or its own) normed hidden state of t and the embedding of the
        token at t + 1; at t = 0 the embedding is dropped, as the serving engine does.
        """
        first = torch.ones(embedded.shape[1], 1, device=embedded.device, dtype=embedded.dtype)
        first[0] = 0
        both = torch.cat([self.enorm(embedded * first), self.hnorm(hidden)], dim=-1)
        x = self.eh_proj(both)
        x = x + self.self_attn(self.input_layernorm(x), selection)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.shared_head_norm(x)


def in_evaluation(text: TextGeometry, device: torch.device) -> tuple[Nano, Predictor]:
    """Both models in evaluation mode, to be filled."""
    return Nano(text).to(device).eval(), Predictor(text).to(device).eval()
