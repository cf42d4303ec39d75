"""The tensors of the DFlash2 drafter that fits a tiny target.

What: a drafter that knows the cycles of `vocabulary` and nothing else. In its first layer half of
the attention heads fetch the newest token's cycle code: mask queries look for the token flag, which
only that token's embedding has (`fc` leaves the feature empty in context states). The MLP of that
layer is a lookup from codes to the sum of the cycle's head rows, so the shared head's top 8 at
every mask position is the cycle, and the selector's codebooks walk it from the newest token. All
else (context heads, convolutions, second layer) is random and weak. Why constructed: see
`vocabulary`.

What must stay true: the drafter depends on the head of its target, which differs between families,
so it is built for a family and a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm_exl3.ref.tiny import configs
from glm_exl3.ref.tiny.geometry import DraftGeometry, Geometry
from glm_exl3.ref.tiny.matrices import MatrixMaker
from glm_exl3.ref.tiny.recipe import DRAFT_BF16, DRAFT_EXL3, RECIPES, Family, RandomStreams, Role
from glm_exl3.ref.tiny.target import decoded_head
from glm_exl3.ref.tiny.vocabulary import (
    CODE,
    MASK_FEATURE,
    TOKEN_FEATURE,
    Cycles,
    cycles,
    directions,
    visible_norm,
)

KERNEL_SIDES = 2


@dataclass(frozen=True)
class DraftStrength:
    """How strong each step of the construction is, beside noise of RMS `noise`.

    `look` weighs the flag in queries and keys, `sharpness` scales queries after their norm, `code`
    is the RMS of a fetched code, `match` the pre-activation of the matching lookup row (mismatches
    reach 1 / sqrt(62) of it), `guess` the RMS of the visible guess, `walk` the selector's bonus.
    """

    noise: float = 0.2
    look: float = 1.0
    sharpness: float = 2.0
    code: float = 4.0
    match: float = 8.0
    guess: float = 6.0
    walk: float = 12.0


def drafter_tensors(
    geometry: Geometry, family: Family, seed: int, *, packed: bool
) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """State dict and `quantization_config` (None for BF16) of the drafter of a target."""
    recipe = DRAFT_EXL3 if packed else DRAFT_BF16
    maker = MatrixMaker(RandomStreams(seed), recipe)
    table, strength = cycles(maker.streams), DraftStrength()
    head = decoded_head(maker.streams, RECIPES[family], geometry.text, table)
    guesses = directions(directions(head)[table.members].sum(1))
    hidden, draft = geometry.text.hidden_size, geometry.draft

    add_context(maker, draft, hidden)
    add_lookup_attention(maker, draft, hidden, strength)
    add_lookup(maker, draft, table.codes, guesses, strength)
    for layer in range(draft.num_hidden_layers):
        if layer:
            add_random_layer(maker, draft, hidden, layer, strength)
        add_layer_rest(maker, draft, hidden, layer)
    norm = visible_norm(1 + 0.1 * maker.streams.normal("norm", hidden))
    maker.plain("norm.weight", norm)
    add_selector(maker, draft, table, guesses * norm, strength)
    return maker.tensors, configs.quantization(recipe, maker.tensors) if packed else None


def _noise(maker: MatrixMaker, module: str, rows: int, columns: int, gain: float) -> Tensor:
    return maker.streams.normal(module, rows, columns) * (gain / columns**0.5)


def add_context(maker: MatrixMaker, draft: DraftGeometry, hidden: int) -> None:
    """`fc` from the tapped target layers to context states without a token flag."""
    weight = _noise(maker, "fc", hidden, hidden * len(draft.target_layer_ids), 1.0)
    weight[TOKEN_FEATURE] = 0
    maker.structured("fc", Role.DRAFT, weight)
    maker.norm("hidden_norm", hidden)


def add_lookup_attention(
    maker: MatrixMaker, draft: DraftGeometry, hidden: int, strength: DraftStrength
) -> None:
    """Attention of layer 0: the heads of KV head 0 fetch codes, the others read the context.

    The shared direction of queries and keys lies in the slowest rotary channels, so that it is the
    same at every distance within a block.
    """
    key, width = "layers.0.self_attn", draft.head_dim
    group = draft.num_attention_heads // draft.num_key_value_heads
    slow = torch.zeros(width)
    channels = torch.tensor([c for c in range(width) if c % (width // 2) >= width * 3 // 8])
    slow[channels] = maker.streams.signs(f"{key}.look", len(channels)) * strength.look

    query = _noise(maker, f"{key}.q_proj", draft.query_width, hidden, strength.noise)
    query[: group * width, MASK_FEATURE] = slow.repeat(group)
    keys = _noise(maker, f"{key}.k_proj", draft.key_width, hidden, strength.noise)
    keys[:width, TOKEN_FEATURE] = slow
    value = _noise(maker, f"{key}.v_proj", draft.key_width, hidden, 1.0)
    code = CODE.stop - CODE.start
    value[:width] = 0
    value[:code, CODE] = torch.eye(code)
    out = _noise(maker, f"{key}.o_proj", hidden, draft.query_width, strength.noise)
    for number in range(group):
        part = out[:, number * width : number * width + code]
        part[CODE] = torch.eye(code) * (strength.code / group)
    for name, weight in (("q", query), ("k", keys), ("v", value), ("o", out)):
        maker.structured(f"{key}.{name}_proj", Role.DRAFT, weight)
    maker.plain(f"{key}.q_norm.weight", torch.full((width,), strength.sharpness))
    maker.norm(f"{key}.k_norm", width)


def add_lookup(
    maker: MatrixMaker,
    draft: DraftGeometry,
    codes: Tensor,
    guesses: Tensor,
    strength: DraftStrength,
) -> None:
    """MLP of layer 0: row c answers to the code of cycle c with the guess of that cycle.

    silu(m) * m is about m squared for the matching row and tiny for the others.
    """
    key, hidden = "layers.0.mlp", guesses.shape[1]
    count, width = codes.shape
    rows = _noise(maker, f"{key}.gate_proj", draft.intermediate_size, hidden, strength.noise)
    rows[:count] = 0
    # Behind the norm a row that holds nothing but a code has the L2 norm sqrt(hidden).
    rows[:count, CODE] = codes * (strength.match / (hidden * width) ** 0.5)
    for name in ("gate", "up"):
        maker.structured(f"{key}.{name}_proj", Role.DRAFT, rows)
    out = _noise(maker, f"{key}.down_proj", hidden, draft.intermediate_size, strength.noise)
    out[:, :count] = guesses.T * (strength.guess / strength.match**2)
    maker.structured(f"{key}.down_proj", Role.DRAFT, out)


def add_random_layer(
    maker: MatrixMaker, draft: DraftGeometry, hidden: int, layer: int, strength: DraftStrength
) -> None:
    """Attention and MLP of a later layer: random and weak."""
    attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
    query, key, inner = draft.query_width, draft.key_width, draft.intermediate_size
    maker.linear(f"{attention}.q_proj", Role.DRAFT, (hidden, query))
    maker.linear(f"{attention}.k_proj", Role.DRAFT, (hidden, key))
    maker.linear(f"{attention}.v_proj", Role.DRAFT, (hidden, key))
    maker.linear(f"{attention}.o_proj", Role.DRAFT, (query, hidden), strength.noise)
    maker.norm(f"{attention}.q_norm", draft.head_dim)
    maker.norm(f"{attention}.k_norm", draft.head_dim)
    maker.linear(f"{mlp}.gate_proj", Role.DRAFT, (hidden, inner))
    maker.linear(f"{mlp}.up_proj", Role.DRAFT, (hidden, inner))
    maker.linear(f"{mlp}.down_proj", Role.DRAFT, (inner, hidden), strength.noise)


def add_layer_rest(maker: MatrixMaker, draft: DraftGeometry, hidden: int, layer: int) -> None:
    """Norms and dynamic convolutions of a layer; the convolutions mix a block's rows weakly."""
    key, taps = f"layers.{layer}", draft.conv_kernel_size
    maker.norm(f"{key}.input_layernorm", hidden)
    maker.norm(f"{key}.post_attention_layernorm", hidden)
    for conv in ("attention_conv", "mlp_conv"):
        module = f"{key}.{conv}"
        base = 0.05 * maker.streams.normal(module, KERNEL_SIDES, taps, hidden)
        base[:, 0] += 1
        maker.plain(f"{module}.base_kernel", base)
        kernels = KERNEL_SIDES * taps * (hidden // draft.conv_group_size)
        maker.linear(f"{module}.kernel_projection", Role.PLAIN, (hidden, kernels), 0.05)


def add_selector(
    maker: MatrixMaker,
    draft: DraftGeometry,
    table: Cycles,
    guesses: Tensor,
    strength: DraftStrength,
) -> None:
    """The candidate selector, whose score of a step p -> c is sum_r P[p] * g * S[c].

    g is the projected hidden state, nearly a function of the cycle, so with S[successor of p] =
    P[p] * sign(g) every step along the cycle gets the bonus sum |g|, and the others get noise.
    """
    rank, hidden = draft.selector_rank, guesses.shape[1]
    key = "candidate_selector"
    projection = _noise(maker, f"{key}.hidden_projection", rank, hidden, 1.0)
    states = guesses * (hidden / guesses.square().sum(-1, keepdim=True)) ** 0.5
    signs = (states @ projection.T.double()).sign().float()[table.cycle]
    vocab = table.successor.shape[0]
    predecessors = maker.streams.signs(f"{key}.predecessor", vocab, rank)
    successors = torch.zeros(vocab, rank)
    inside = table.members.flatten()
    successors[table.successor[inside]] = predecessors[inside] * signs[inside]
    maker.plain(f"{key}.predecessor_codebook", predecessors * (strength.walk / rank))
    maker.plain(f"{key}.successor_codebook", successors)
    maker.plain(f"{key}.hidden_projection.weight", projection)
