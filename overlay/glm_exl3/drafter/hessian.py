"""What the inputs of a drafter's matrices look like, without data: synthetic Hessians.

Behind a norm every row has the norm's own scales, and little else is known without the target and
its text. So rows are drawn as isotropic noise, scaled by the norm's weight, and pushed through the
layer's own operations: the convolution in front of the projections, the values that attention
averages, the gated product in front of `down_proj`. X^T X of the result is the metric in which the
encoder spends its bits. `fc` reads states of the target; for it nothing is assumed.

Averages over few positions stand for attention: its weights depend on the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

ATTENDED = 4
ROWS_PER_FEATURE = 2
Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Numbers of a drafter's configuration that its inputs depend on."""

    heads: int
    kv_heads: int
    head_dim: int
    taps: int
    group: int
    block: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From config.json. Raises KeyError for a key that vLLM needs, too."""
        heads, dflash = int(config["num_attention_heads"]), config["dflash_config"]
        return cls(
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            taps=int(dflash["conv_kernel_size"]),
            group=int(dflash["conv_group_size"]),
            block=int(config.get("block_size") or 8),
        )


def layer_hessians(
    read: Read, layer: int, shape: Shape, seed: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """X^T X fp32 [k, k] by module of one layer.

    `read` returns a tensor of the checkpoint by name, fp32 on `device`.
    """
    stem = f"layers.{layer}"
    generator = torch.Generator(device).manual_seed(seed)
    down = read(f"{stem}.mlp.down_proj.weight")
    out = read(f"{stem}.self_attn.o_proj.weight")
    hidden = read(f"{stem}.input_layernorm.weight").numel()
    count = ROWS_PER_FEATURE * max(down.shape[1], out.shape[1], hidden)
    count = -(-count // shape.block) * shape.block

    def rows(norm: str) -> torch.Tensor:
        noise = torch.randn(count, hidden, generator=generator, device=device)
        return noise * read(f"{stem}.{norm}.weight")

    found: dict[str, torch.Tensor] = {}
    normed = rows("input_layernorm")
    found[f"{stem}.attention_conv.kernel_projection"] = gram(normed)
    mixed = convolved(read, f"{stem}.attention_conv", normed, shape)
    found[f"{stem}.self_attn.q_proj"] = gram(mixed)
    values = mixed @ read(f"{stem}.self_attn.v_proj.weight").T
    found[f"{stem}.self_attn.o_proj"] = gram(attended(values, shape, generator))
    del values, mixed
    normed = rows("post_attention_layernorm")
    found[f"{stem}.mlp_conv.kernel_projection"] = gram(normed)
    mixed = convolved(read, f"{stem}.mlp_conv", normed, shape)
    found[f"{stem}.mlp.gate_proj"] = gram(mixed)
    gate = F.silu(mixed @ read(f"{stem}.mlp.gate_proj.weight").T)
    found[f"{stem}.mlp.down_proj"] = gram(gate * (mixed @ read(f"{stem}.mlp.up_proj.weight").T))
    return found


def gram(rows: torch.Tensor) -> torch.Tensor:
    return rows.T @ rows


def convolved(read: Read, key: str, rows: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The first of the two dynamic convolutions of `key` over blocks of rows [n, hidden].

    Each tap's kernel is the base kernel plus a value per group that the row itself projects; a row
    sees itself and the rows before it in its block.
    """
    base = read(f"{key}.base_kernel")[0]
    projected = rows @ read(f"{key}.kernel_projection.weight").T
    groups = rows.shape[1] // shape.group
    delta = projected.reshape(len(rows), 2, shape.taps, groups)[:, 0]
    blocks = rows.unflatten(0, (-1, shape.block))
    result = torch.zeros_like(rows)
    for tap in range(shape.taps):
        kernel = base[tap] + delta[:, tap].repeat_interleave(shape.group, dim=1)
        shifted = F.pad(blocks, (0, 0, tap, 0))[:, : shape.block].flatten(0, 1)
        result += kernel * shifted
    return result


def attended(values: torch.Tensor, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """What attention could give of values [n, kv width]: every head averages a few random rows."""
    count, device = len(values), values.device
    heads = values.unflatten(1, (shape.kv_heads, shape.head_dim))
    parts = []
    for head in range(shape.heads):
        source = heads[:, head * shape.kv_heads // shape.heads]
        chosen = torch.randint(count, (count, ATTENDED), generator=generator, device=device)
        logits = torch.randn(count, ATTENDED, generator=generator, device=device)
        weights = logits.softmax(-1)
        parts.append(torch.einsum("nj,njd->nd", weights, source[chosen]))
    return torch.cat(parts, dim=1)
