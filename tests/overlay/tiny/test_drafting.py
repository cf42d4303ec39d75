"""Acceptance of the constructed drafts, and the re-stated pieces that measure it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm_exl3.ref.tiny.build import build_drafter
from glm_exl3.ref.tiny.drafting import DFlash2, accepted, grouped_conv, mtp_drafts, rms_norm, rotate
from glm_exl3.ref.tiny.geometry import geometry
from glm_exl3.ref.tiny.recipe import Family, RandomStreams
from glm_exl3.ref.tiny.twin import decode_modules, dequantised_state_dict, read_tensors
from glm_exl3.ref.tiny.vocabulary import CYCLE, cycles

GEOMETRY = geometry()
PROMPTS = 4
GENERATED = 64
PREFIX = "model.language_model"


@dataclass(frozen=True)
class Text:
    """A greedy continuation: all tokens, where it starts, taps and final states, top-2 margins."""

    tokens: list[int]
    start: int
    taps: Tensor
    final: Tensor
    margins: Tensor


def stream_means(model: Any, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """Mean of the residual streams behind every layer, and the normed final states."""
    means: list[Tensor] = []
    layers = model.model.language_model.layers
    hooks = [
        layer.register_forward_hook(lambda _, __, out: means.append(out[0].mean(2)[0]))
        for layer in layers
    ]
    with torch.no_grad():
        final = model.model(input_ids=tokens).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return means, final


def continuations(model: Any) -> list[Text]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for number in range(PROMPTS):
        start = 9 + 30 * number
        prompt = torch.randint(64, 1800, (1, start), generator=generator)
        run = model.generate(
            prompt,
            max_new_tokens=GENERATED,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        means, final = stream_means(model, run.sequences)
        taps = torch.cat([means[i] for i in GEOMETRY.draft.target_layer_ids], dim=-1)
        top = torch.cat(run.logits).topk(2).values
        found.append(Text(run.sequences[0].tolist(), start, taps, final, top[:, 0] - top[:, 1]))
    return found


def mtp_block(model: Any, weights: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """Attention and MoE of the MTP layer from transformers' modules, on the plain residual."""
    from transformers.models.glm5_next import modeling_glm5_next as modelling

    config = copy.deepcopy(model.config.text_config)
    config._attn_implementation = "eager"
    key = f"{PREFIX}.layers.{GEOMETRY.text.mtp_layer}."
    own = {n.removeprefix(key): t.float() for n, t in weights.items() if n.startswith(key)}
    attention, moe = modelling.Glm5NextTextAttention(config, 3), modelling.Glm5NextTextMoE(config)
    attention.load_state_dict(
        {n.removeprefix("self_attn."): t for n, t in own.items() if n.startswith("self_attn.")}
    )

    def stacked(name: str) -> Tensor:
        count = GEOMETRY.text.n_routed_experts
        return torch.stack([own[f"mlp.experts.{e}.{name}_proj.weight"] for e in range(count)])

    plain = {
        n.removeprefix("mlp."): t
        for n, t in own.items()
        if n.startswith("mlp.") and ".experts." not in n
    }
    gate_up = torch.cat([stacked("gate"), stacked("up")], dim=1)
    merged = {"experts.gate_up_proj": gate_up, "experts.down_proj": stacked("down")}
    moe.load_state_dict(plain | merged)
    eps = GEOMETRY.text.rms_norm_eps

    def block(x: Tensor) -> Tensor:
        normed = rms_norm(x, own["input_layernorm.weight"], eps)
        mask = torch.ones(1, x.shape[0], dtype=torch.bool)
        x = x + attention(hidden_states=normed[None], attention_mask=mask)[0][0]
        return x + moe(rms_norm(x, own["post_attention_layernorm.weight"], eps)[None])[0]

    return block


@dataclass(frozen=True)
class Subject:
    """One family: its twin in transformers, its dense weights and greedy continuations."""

    family: Family
    model: Any
    weights: dict[str, Tensor]
    texts: list[Text]
    drafter: Path

    def proposer(self, folder: Path) -> DFlash2:
        dense = decode_modules(read_tensors(folder), torch.float32)
        embeddings = self.weights[f"{PREFIX}.embed_tokens.weight"]
        return DFlash2(GEOMETRY, dense, embeddings, self.weights["lm_head.weight"])


@pytest.fixture(scope="module", params=["tr3", "full"])
def subject(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Subject:
    from glm_exl3.cpu import torchvision

    torchvision.prepare()
    from transformers import Glm5NextForConditionalGeneration

    name = request.param
    model = Glm5NextForConditionalGeneration.from_pretrained(
        folders[f"{name}-twin"], dtype=torch.float32
    )
    weights = dequantised_state_dict(folders[name], mtp=True)
    texts = continuations(model)
    return Subject(Family(name), model, weights, texts, folders[f"{name}-drafter"])


def dflash_counts(drafter: DFlash2, text: Text, drafts: int) -> list[int]:
    """Accepted drafts of every step of a drafted decode of `text`."""
    counts: list[int] = []
    anchor = text.start
    while anchor + drafts < len(text.tokens):
        proposed = drafter.propose(text.tokens[anchor], text.taps[:anchor], drafts)
        counts.append(accepted(proposed, text.tokens[anchor + 1 :]))
        anchor += counts[-1] + 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [3, 7])
def test_some_dflash2_drafts_are_accepted_and_some_are_not(subject: Subject, drafts: int) -> None:
    drafter = subject.proposer(subject.drafter)
    with torch.no_grad():
        per_text = [dflash_counts(drafter, text, drafts) for text in subject.texts]
    counts = [count for text in per_text for count in text]
    assert 0.2 < sum(counts) / len(counts) / drafts < 0.8
    assert all(0 in text and max(text) >= 2 for text in per_text)


@pytest.mark.slow
def test_some_mtp_drafts_are_accepted_and_some_are_not(subject: Subject) -> None:
    block = mtp_block(subject.model, subject.weights)
    right: list[bool] = []
    for text in subject.texts:
        with torch.no_grad():
            drafts = mtp_drafts(GEOMETRY, subject.weights, block, text.tokens, text.final)
        steps = range(text.start - 1, len(text.tokens) - 2)
        right += [drafts[step] == text.tokens[step + 2] for step in steps]
    assert 0.3 < sum(right) / len(right) < 0.8


@pytest.mark.slow
def test_greedy_text_is_not_degenerate(subject: Subject) -> None:
    for text in subject.texts:
        spoken = text.tokens[text.start :]
        assert len(set(spoken)) > 2 * CYCLE
        doubled = sum(a == b for a, b in zip(spoken, spoken[1:], strict=False))
        assert doubled < len(spoken) / 8
    margins = torch.cat([text.margins for text in subject.texts])
    assert margins.median() > 0.5
    assert (margins < 0.05).float().mean() < 0.12


@pytest.mark.slow
def test_the_six_bit_drafter_proposes_nearly_what_the_bf16_one_does(
    subject: Subject, tmp_path: Path
) -> None:
    build_drafter(tmp_path, subject.family, packed=True)
    dense, packed = subject.proposer(subject.drafter), subject.proposer(tmp_path)
    text = subject.texts[0]
    same = 0
    for anchor in range(text.start, text.start + 20):
        arguments = text.tokens[anchor], text.taps[:anchor], 3
        with torch.no_grad():
            same += dense.propose(*arguments) == packed.propose(*arguments)
    assert same >= 18


def test_every_cycle_is_walked_in_order_by_its_own_members() -> None:
    table = cycles(RandomStreams(0))
    assert torch.equal(table.successor[table.members], table.members.roll(-1, dims=1))
    assert table.members.unique().numel() == table.members.numel()
    assert (table.cycle[table.successor] == table.cycle).all()


def test_a_convolution_without_later_taps_scales_and_does_not_reach_back_over_the_block() -> None:
    x, base = torch.randn(4, 64), torch.zeros(3, 64)
    base[0], base[2] = 2.0, 1.0
    out = grouped_conv(x, torch.zeros(4, 3, 2), base, 32)
    assert torch.allclose(out[:2], 2 * x[:2])
    assert torch.allclose(out[2:], 2 * x[2:] + x[:2])


def test_rotation_keeps_norms_and_depends_on_distance_only() -> None:
    x = torch.randn(1, 1, 128).expand(2, 1, 128)
    near, far = (rotate(x, torch.tensor(p), 1e4) for p in ([0, 5], [100, 105]))
    assert torch.allclose(near.norm(dim=-1), x.norm(dim=-1), rtol=1e-4)
    assert torch.allclose((near[0] * near[1]).sum(), (far[0] * far[1]).sum(), rtol=1e-3)


def test_acceptance_stops_at_the_first_wrong_draft() -> None:
    assert accepted([1, 2, 9, 4], [1, 2, 3, 4]) == 2
    assert accepted([5], [1]) == 0
    assert accepted([1, 2], [1, 2, 3]) == 2
