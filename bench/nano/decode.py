"""Token-by-token generation with the training modules, many rows at once.

One step has static shapes and changes its memory in place, so that on a GPU it is captured once as
a CUDA graph and replayed. It computes what the modules' own forward computes for the last position
(`tests/bench/test_nano_decode.py` compares them). All rows stand at the same position; a row's own
prompt is forced until it ends, then tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nano.kda import unit
from nano.layers import Indexer, KdaAttention, MlaAttention
from nano.model import Layer, Nano, hyper_mix

_WARM_STEPS = 3


@dataclass(frozen=True)
class KdaMemory:
    """Last convolution inputs `[3, B, inner, taps - 1]` and the state fp32 `[B, heads, D, D]`."""

    window: Tensor
    state: Tensor


@dataclass(frozen=True)
class MlaMemory:
    """Keys and values `[B, heads, T, D]`, pooled keys `[B, P, W]`, the open pool `[2, B, pool, W]`.

    The open pool holds index keys and gates, fp32.
    """

    keys: Tensor
    values: Tensor
    pooled: Tensor
    open_pool: Tensor


def kda_memory(block: KdaAttention, rows: int, kind: torch.dtype) -> KdaMemory:
    """Empty memory of a KDA layer; `kind` is the dtype of activations."""
    inner, device = block.heads * block.width, block.A_log.device
    taps = block.q_conv1d.weight.shape[-1]
    return KdaMemory(
        torch.zeros(3, rows, inner, taps - 1, dtype=kind, device=device),
        torch.zeros(rows, block.heads, block.width, block.width, device=device),
    )


def mla_memory(block: MlaAttention, rows: int, length: int, kind: torch.dtype) -> MlaMemory:
    """Empty memory of an MLA layer for `length` positions, a multiple of the pool."""
    device, width = block.o_proj.weight.device, block.indexer.width
    return MlaMemory(
        torch.zeros(rows, block.heads, length, block.nope, dtype=kind, device=device),
        torch.zeros(rows, block.heads, length, block.v_width, dtype=kind, device=device),
        torch.zeros(rows, length // block.pool, width, dtype=kind, device=device),
        torch.zeros(2, rows, block.pool, width, device=device),
    )


def kda_step(block: KdaAttention, x: Tensor, memory: KdaMemory) -> Tensor:
    """Output `[B, 1, H]` of a KDA layer for the next token x `[B, 1, H]`."""
    parts = [projection(x)[:, 0] for projection in (block.q_proj, block.k_proj, block.v_proj)]
    window = torch.cat([memory.window, torch.stack(parts)[..., None]], dim=-1)
    memory.window.copy_(window[..., 1:])
    convolutions = (block.q_conv1d, block.k_conv1d, block.v_conv1d)
    kernels = torch.stack([conv.weight[:, 0] for conv in convolutions])[:, None]
    mixed = (window.float() * kernels.to(window.dtype).float()).sum(-1).to(window.dtype)
    q, k, v = F.silu(mixed).unflatten(-1, (block.heads, block.width)).unbind(0)
    raw = (block.f_b_proj(block.f_a_proj(x)).float() + block.dt_bias)[:, 0]
    slope = block.A_log.exp().view(block.heads, 1)
    decay = block.lower_bound * torch.sigmoid(slope * raw.unflatten(-1, (block.heads, -1)))
    beta = block.b_proj(x).sigmoid()[:, 0, :, None].float()
    with torch.autocast(x.device.type, enabled=False):
        q, k = unit(q) * block.width**-0.5, unit(k)
        state = memory.state * decay.exp()[..., None]
        update = beta * (v.float() - (k[..., None, :] @ state)[..., 0, :])
        state = state + k[..., None] * update[..., None, :]
        memory.state.copy_(state)
        out = (q[..., None, :] @ state)[..., 0, :][:, None]
    gate = block.g_b_proj(block.g_a_proj(x)).float().view_as(out)
    out = (block.o_norm(out) * gate.sigmoid()).to(x.dtype)
    return block.o_proj(out.flatten(-2))


def visible_keys(
    block: MlaAttention, x: Tensor, residual: Tensor, memory: MlaMemory, position: Tensor
) -> Tensor:
    """Bool `[B, T]`: the positions that the query at `position` `[1]` attends to."""
    indexer: Indexer = block.indexer
    pool, pools = block.pool, memory.pooled.shape[1]
    q = indexer.wq_b(residual).view(-1, indexer.heads, indexer.width)
    gate = F.linear(x, indexer.index_kpool_compress_gate)
    entry = torch.stack([indexer.k_norm(indexer.wk(x)).float(), gate.float()])
    memory.open_pool.index_copy_(2, position % pool, entry)
    keys, gates = memory.open_pool.unbind(0)
    pooled = ((gates + indexer.index_kpool_compress_ape).softmax(1) * keys).sum(1, keepdim=True)
    memory.pooled.index_copy_(1, position // pool, pooled.to(memory.pooled.dtype))
    raw = torch.einsum("bhd,bpd->bhp", q, memory.pooled.to(q.dtype)) * indexer.width**-0.5
    weights = indexer.weights_proj(x)[:, 0].float() * indexer.heads**-0.5
    score = torch.einsum("bh,bhp->bp", weights, F.relu(raw).float())
    ends = torch.arange(pools, device=x.device) * pool + pool - 1
    score = score.masked_fill(ends > position, float("-inf"))
    best = score.topk(min(block.top_pools, pools), dim=-1)
    chosen = torch.zeros_like(score, dtype=torch.bool)
    chosen.scatter_(-1, best.indices, best.values > -1e30)
    slots = torch.arange(pools * pool, device=x.device)
    tail = (slots >= (position + 1) // pool * pool) & (slots <= position)
    return chosen.repeat_interleave(pool, dim=-1) | tail


def mla_step(block: MlaAttention, x: Tensor, memory: MlaMemory, position: Tensor) -> Tensor:
    """Output `[B, 1, H]` of an MLA layer for the next token x `[B, 1, H]`."""
    residual = block.q_a_layernorm(block.q_a_proj(x))
    q = block.q_b_proj(residual).unflatten(-1, (block.heads, block.nope)).transpose(1, 2)
    latent = block.kv_a_layernorm(block.kv_a_proj_with_mqa(x))
    both = block.kv_b_proj(latent).unflatten(-1, (block.heads, -1)).transpose(1, 2)
    k, v = both.split([block.nope, block.v_width], dim=-1)
    memory.keys.index_copy_(2, position, k.to(memory.keys.dtype))
    memory.values.index_copy_(2, position, v.to(memory.values.dtype))
    mask = visible_keys(block, x, residual, memory, position)[:, None, None]
    out = F.scaled_dot_product_attention(
        q.to(memory.keys.dtype), memory.keys, memory.values, attn_mask=mask
    )
    return block.o_proj(out.transpose(1, 2).flatten(-2))


class Generator:
    """Rows of tokens `[B, T]` that grow together; see `generate`."""

    def __init__(
        self, target: Nano, tokens: Tensor, lengths: Tensor, temperatures: Tensor, kind: torch.dtype
    ) -> None:
        rows, length = tokens.shape
        self.target, self.kind = target, kind
        self.tokens, self.lengths, self.temperatures = tokens, lengths, temperatures
        self.position = torch.zeros(1, dtype=torch.long, device=tokens.device)
        self.logits = torch.zeros(rows, target.geometry.vocab_size, device=tokens.device)
        self.memory: list[KdaMemory | MlaMemory] = [
            kda_memory(layer.self_attn, rows, kind)
            if layer.linear_attention
            else mla_memory(layer.self_attn, rows, length + -length % layer.self_attn.pool, kind)
            for layer in target.layers
        ]

    def layer(self, layer: Layer, memory: KdaMemory | MlaMemory, streams: Tensor) -> Tensor:
        """One decoder layer for streams `[B, 1, N, H]`."""
        collapsed, post, comb = layer.attn_hc(streams)
        x = layer.input_layernorm(collapsed)
        if isinstance(memory, KdaMemory):
            out = kda_step(layer.self_attn, x, memory)
        else:
            out = mla_step(layer.self_attn, x, memory, self.position)
        streams = hyper_mix(streams, out, post, comb)
        collapsed, post, comb = layer.ffn_hc(streams)
        out = layer.mlp(layer.post_attention_layernorm(collapsed))
        return hyper_mix(streams, out, post, comb)

    def step(self) -> None:
        """Read the token at the position, choose or keep the next one, move on."""
        device = self.tokens.device.type
        now = self.tokens.index_select(1, self.position)
        with torch.autocast(
            device, self.kind, enabled=self.kind != torch.float32, cache_enabled=False
        ):
            embedded = self.target.embed_tokens(now).to(self.kind)
            streams = embedded[:, :, None].expand(-1, -1, self.target.geometry.hc_mult, -1)
            for layer, memory in zip(self.target.layers, self.memory, strict=True):
                streams = self.layer(layer, memory, streams.contiguous())
            hidden = self.target.norm(streams.mean(2))
            self.logits.copy_(F.linear(hidden, self.target.lm_head.weight.to(hidden.dtype))[:, 0])
        noise = -(-torch.rand_like(self.logits).clamp_min(1e-20).log()).clamp_min(1e-20).log()
        chosen = (self.logits + self.temperatures[:, None] * noise).argmax(-1)
        following = self.tokens.index_select(1, self.position + 1)[:, 0]
        following = following.where(self.position + 1 < self.lengths, chosen)
        self.tokens.index_copy_(1, self.position + 1, following[:, None])
        self.position.add_(1)

    def captured(self) -> Callable[[], None]:
        """The step as a CUDA graph where that works; the memory is empty afterwards."""
        if not self.tokens.is_cuda:
            return self.step
        before = self.tokens.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_STEPS):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                self.step()
            run: Callable[[], None] = graph.replay
        except RuntimeError as error:
            print(f"generating without a graph: {str(error)[:200]}", flush=True)
            torch.cuda.synchronize()
            run = self.step
        self.tokens.copy_(before)
        self.position.zero_()
        for memory in self.memory:
            for part in vars(memory).values():
                part.zero_()
        return run


@torch.no_grad()
def generate(
    target: Nano,
    prompts: Tensor,
    lengths: Tensor,
    total: int,
    temperatures: Tensor | float = 0.0,
    kind: torch.dtype | None = None,
) -> Tensor:
    """Texts `[B, total]`: the first `lengths` `[B]` tokens of `prompts` `[B, P]`, continued.

    Temperature 0 is greedy; it may differ by row `[B]`. Sampling draws from torch's default
    generator. `kind` is the autocast dtype, fp32 for none; left out, BF16 on a GPU.
    """
    rows, device = prompts.shape[0], prompts.device
    kind = kind or (torch.bfloat16 if prompts.is_cuda else torch.float32)
    tokens = F.pad(prompts, (0, total - prompts.shape[1])).contiguous().long()
    warmth = torch.as_tensor(temperatures, dtype=torch.float32, device=device).expand(rows)
    generator = Generator(target, tokens, lengths.to(device), warmth.contiguous(), kind)
    run = generator.captured()
    for _ in range(total - 1):
        run()
    return generator.tokens
