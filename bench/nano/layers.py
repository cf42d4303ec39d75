"""The layers of the miniature for training, with the tensor names of the checkpoint.

Definition: transformers' `modeling_glm5_next`. The differences are of form only: all experts run as
two dense products with zero weight for those not chosen (eight experts: one large product is faster
than eight small ones and has static shapes), KDA is `nano.kda`, attention is dense unless a
selection mask is given, and the indexer returns scores that carry a gradient. `tests` compare each
layer with transformers' module on the same weights.

Parameters are fp32; the caller runs the model under bf16 autocast. Tensor names equal those of the
published checkpoint below `model.language_model.`, except that experts are stacked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nano import kda
from nano.geometry import TextGeometry


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim in fp32, returned in the input's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


class RmsNorm(nn.Module):
    """RMSNorm in fp32, returned in the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear map without bias, initialised for unit gain."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.7 * inputs**-0.5)
    return layer


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up with the gate clamped from above before SiLU and up clamped both ways."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Mlp(nn.Module):
    """A dense (or shared-expert) clamped SwiGLU block."""

    def __init__(self, geometry: TextGeometry, width: int) -> None:
        super().__init__()
        self.limit = geometry.swiglu_limit
        self.gate_proj = linear(geometry.hidden_size, width)
        self.up_proj = linear(geometry.hidden_size, width)
        self.down_proj = linear(width, geometry.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(clamped_swiglu(self.gate_proj(x), self.up_proj(x), self.limit))


class Router(nn.Module):
    """Sigmoid scores with a correction bias that only affects the choice."""

    def __init__(self, geometry: TextGeometry) -> None:
        super().__init__()
        self.top_k = geometry.num_experts_per_tok
        self.scaling = geometry.routed_scaling_factor
        self.weight = nn.Parameter(
            torch.randn(geometry.n_routed_experts, geometry.hidden_size) * 0.02
        )
        self.register_buffer("e_score_correction_bias", torch.zeros(geometry.n_routed_experts))
        self.register_buffer("load", torch.zeros(geometry.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Weights `[N, E]` fp32 for x `[N, H]`, zero for experts not chosen; counts the load."""
        with torch.autocast(x.device.type, enabled=False):
            score = F.linear(x.float(), self.weight).sigmoid()
        chosen = (score + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(score).scatter_(-1, chosen, 1.0)
        if self.training:
            self.load.add_(mask.sum(0).detach())
        kept = score * mask
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.scaling

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the bias towards equal load and clear the counts."""
        self.e_score_correction_bias.add_(rate * torch.sign(self.load.mean() - self.load))
        self.load.zero_()


class Experts(nn.Module):
    """Stacked expert weights: gate_up `[E, 2I, H]`, down `[E, H, I]`."""

    def __init__(self, geometry: TextGeometry) -> None:
        super().__init__()
        count, width, hidden = (
            geometry.n_routed_experts,
            geometry.moe_intermediate_size,
            geometry.hidden_size,
        )
        self.limit = geometry.swiglu_limit
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * width, hidden) * 0.7 * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, width) * 0.5 * width**-0.5)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum over experts: x `[N, H]`, weights `[N, E]`."""
        count, double, _ = self.gate_up_proj.shape
        both = F.linear(x, self.gate_up_proj.flatten(0, 1)).view(-1, count, double)
        inner = expert_activation(both, weights, self.limit)
        return F.linear(inner.flatten(1), self.down_proj.permute(1, 0, 2).flatten(1))


def expert_activation(both: Tensor, weights: Tensor, limit: float) -> Tensor:
    """Activation of `[N, E, 2I]` scaled by the routing weight, `[N, E, I]`."""
    gate, up = both.chunk(2, dim=-1)
    return (clamped_swiglu(gate, up, limit) * weights[..., None]).to(both.dtype)


class Moe(nn.Module):
    """Routed experts plus one shared expert."""

    def __init__(self, geometry: TextGeometry) -> None:
        super().__init__()
        self.gate = Router(geometry)
        self.experts = Experts(geometry)
        self.shared_experts = Mlp(
            geometry, geometry.moe_intermediate_size * geometry.n_shared_experts
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        return self.experts(flat, self.gate(flat)).view_as(x) + self.shared_experts(x)


class KdaAttention(nn.Module):
    """Kimi Delta Attention layer."""

    def __init__(self, geometry: TextGeometry) -> None:
        super().__init__()
        hidden, heads, width = (
            geometry.hidden_size,
            geometry.linear_num_heads,
            geometry.linear_head_dim,
        )
        self.heads, self.width, inner = heads, width, heads * width
        self.lower_bound = geometry.linear_lower_bound
        self.q_proj, self.k_proj, self.v_proj = (linear(hidden, inner) for _ in range(3))
        taps = geometry.linear_conv_kernel_dim
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            conv = nn.Conv1d(inner, inner, taps, groups=inner, padding=taps - 1, bias=False)
            nn.init.normal_(conv.weight, std=0.15)
            conv.weight.data[:, :, -1] += 0.8
            setattr(self, name, conv)
        self.b_proj = linear(hidden, heads)
        self.f_a_proj, self.f_b_proj = linear(hidden, width), linear(width, inner)
        self.g_a_proj, self.g_b_proj = linear(hidden, width), linear(width, inner)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.empty(inner).uniform_(-7.0, -1.5))
        self.o_norm = RmsNorm(width, geometry.rms_norm_eps)
        self.o_proj = linear(inner, hidden)

    def convolved(self, x: Tensor, name: str) -> Tensor:
        """Causal depthwise convolution and SiLU of one projection, `[B, T, H, D]`."""
        conv = getattr(self, name)
        out = F.silu(conv(x.transpose(1, 2))[..., : x.shape[1]])
        return out.transpose(1, 2).unflatten(-1, (self.heads, self.width))

    def forward(self, x: Tensor) -> Tensor:
        q = self.convolved(self.q_proj(x), "q_conv1d")
        k = self.convolved(self.k_proj(x), "k_conv1d")
        v = self.convolved(self.v_proj(x), "v_conv1d")
        raw = self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias
        slope = self.A_log.exp().view(self.heads, 1)
        decay = self.lower_bound * torch.sigmoid(
            slope * raw.unflatten(-1, (self.heads, self.width))
        )
        beta = self.b_proj(x).sigmoid()
        with torch.autocast(x.device.type, enabled=False):
            out = kda.chunked(q, k, v, decay, beta)
        gate = self.g_b_proj(self.g_a_proj(x)).float().view_as(out)
        out = (self.o_norm(out) * gate.sigmoid()).to(x.dtype)
        return self.o_proj(out.flatten(-2))


@dataclass
class Selection:
    """What an attention layer is asked for besides its output.

    `sparse` restricts attention to the indexer's choice, `blind` to as many pools chosen at random
    (to see what the choice is worth); `teach` is the number of leading rows of the batch for which
    the indexer's loss is computed (0 = none); `loss` and `recall` receive the results.
    """

    sparse: bool = False
    blind: bool = False
    teach: int = 0
    loss: Tensor | None = None
    recall: Tensor | None = None


class Indexer(nn.Module):
    """Scores of complete key pools for each query; names as in the checkpoint."""

    def __init__(self, geometry: TextGeometry) -> None:
        super().__init__()
        self.heads, self.width = geometry.index_n_heads, geometry.index_head_dim
        self.pool = geometry.index_kpool
        self.wq_b = linear(geometry.q_lora_rank, self.heads * self.width)
        self.wk = linear(geometry.hidden_size, self.width)
        self.k_norm = nn.LayerNorm(self.width, eps=1e-6)
        self.weights_proj = linear(geometry.hidden_size, self.heads)
        self.index_kpool_compress_ape = nn.Parameter(torch.zeros(self.pool, self.width))
        self.index_kpool_compress_gate = nn.Parameter(torch.zeros(self.width, geometry.hidden_size))

    def forward(self, x: Tensor, q_residual: Tensor) -> Tensor:
        """Scores fp32 `[B, T, P]`, P = T // pool, `-inf` where the pool's end is not visible."""
        batch, length, _ = x.shape
        pools = length // self.pool
        q = self.wq_b(q_residual).view(batch, length, self.heads, self.width)
        keys, gate = self.k_norm(self.wk(x)).float(), F.linear(x, self.index_kpool_compress_gate)
        keys, gate = (
            t[:, : pools * self.pool].unflatten(1, (pools, self.pool)) for t in (keys, gate)
        )
        mix = (gate.float() + self.index_kpool_compress_ape).softmax(2)
        pooled = (mix * keys).sum(2).to(q.dtype)
        raw = torch.einsum("bthd,bpd->bthp", q, pooled) * self.width**-0.5
        weights = self.weights_proj(x).float() * self.heads**-0.5
        score = torch.einsum("bth,bthp->btp", weights, F.relu(raw).float())
        return score.masked_fill(~visible_pools(length, self.pool, x.device), float("-inf"))


def visible_pools(length: int, pool: int, device: torch.device) -> Tensor:
    """Bool `[T, T // pool]`: the pool is complete at the query's position."""
    ends = torch.arange(length // pool, device=device) * pool + pool - 1
    return ends[None, :] <= torch.arange(length, device=device)[:, None]


class MlaAttention(nn.Module):
    """Multi-head latent attention without positions, with the sparse indexer."""

    def __init__(self, geometry: TextGeometry) -> None:
        super().__init__()
        hidden, self.heads = geometry.hidden_size, geometry.num_attention_heads
        self.nope, self.v_width = geometry.qk_nope_head_dim, geometry.v_head_dim
        self.pool, self.top_pools = (
            geometry.index_kpool,
            geometry.index_topk // geometry.index_kpool,
        )
        self.q_a_proj = linear(hidden, geometry.q_lora_rank)
        self.q_a_layernorm = RmsNorm(geometry.q_lora_rank, geometry.rms_norm_eps)
        self.q_b_proj = linear(geometry.q_lora_rank, self.heads * self.nope)
        self.kv_a_proj_with_mqa = linear(hidden, geometry.kv_lora_rank)
        self.kv_a_layernorm = RmsNorm(geometry.kv_lora_rank, geometry.rms_norm_eps)
        self.kv_b_proj = linear(geometry.kv_lora_rank, self.heads * (self.nope + self.v_width))
        self.o_proj = linear(self.heads * self.v_width, hidden)
        self.indexer = Indexer(geometry)

    def forward(self, x: Tensor, selection: Selection) -> Tensor:
        residual = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(residual).unflatten(-1, (self.heads, self.nope)).transpose(1, 2)
        latent = self.kv_a_layernorm(self.kv_a_proj_with_mqa(x))
        both = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = both.split([self.nope, self.v_width], dim=-1)
        if selection.teach:
            rows = selection.teach
            score = self.indexer(x[:rows].detach(), residual[:rows].detach())
            selection.loss, selection.recall = teach(
                score, q[:rows], k[:rows], self.pool, self.top_pools
            )
        mask = None
        if selection.sparse or selection.blind:
            with torch.no_grad():
                score = self.indexer(x, residual)
                score = (
                    torch.rand_like(score).where(score.isfinite(), score)
                    if selection.blind
                    else score
                )
                mask = selected(score, self.pool, self.top_pools)[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


def selected(score: Tensor, pool: int, count: int) -> Tensor:
    """Attention mask bool `[B, T, T]` of the best `count` pools and the query's incomplete pool."""
    batch, length, pools = score.shape
    best = score.topk(min(count, pools), dim=-1)
    chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(
        -1, best.indices, best.values > -1e30
    )
    keys = chosen.repeat_interleave(pool, dim=-1)
    keys = F.pad(keys, (0, length - keys.shape[-1]))
    position = torch.arange(length, device=score.device)
    tail_start = (position + 1) // pool * pool
    tail = (position[None, :] >= tail_start[:, None]) & (position[None, :] <= position[:, None])
    return keys | tail


def teach(score: Tensor, q: Tensor, k: Tensor, pool: int, count: int) -> tuple[Tensor, Tensor]:
    """KL from the dense attention's mass per pool to the indexer's softmax, and its recall.

    The target is the mean over heads of the attention on complete pools, renormalised. Recall is
    the share of that mass which the best `count` pools hold, over queries with more pools.
    """
    length, pools = score.shape[1:]
    with torch.no_grad():
        logits = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        mass = logits.masked_fill(future, float("-inf")).softmax(-1).mean(1)
        mass = mass[..., : pools * pool].unflatten(-1, (pools, pool)).sum(-1)
        mass = mass * visible_pools(length, pool, q.device)
        mass = mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)
        kept = mass.gather(-1, score.topk(min(count, pools), dim=-1).indices).sum(-1)
        recall = kept[:, (count + 1) * pool :].mean()
    prediction = score[:, pool - 1 :].log_softmax(-1).masked_fill(mass[:, pool - 1 :] == 0, 0.0)
    target = mass[:, pool - 1 :]
    entropy = torch.special.xlogy(target, target).sum(-1)
    return (entropy - (target * prediction).sum(-1)).mean(), recall
