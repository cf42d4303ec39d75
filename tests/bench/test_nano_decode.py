from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from nano.decode import Generator, generate
from nano.evaluate import SPARSE
from nano.geometry import nano_geometry
from nano.model import Nano


def target() -> Nano:
    torch.manual_seed(0)
    text = dataclasses.replace(
        nano_geometry().text,
        vocab_size=128,
        n_routed_experts=4,
        index_topk=64,
        hc_sinkhorn_iters=3,
    )
    model = Nano(text).eval()
    for moe in model.moes():
        moe.gate.e_score_correction_bias.normal_(std=0.05)
    return model


@torch.no_grad()
def test_a_step_computes_what_the_whole_text_does() -> None:
    model, tokens = target(), torch.randint(128, (2, 192))
    wanted = F.linear(model(tokens, SPARSE).hidden, model.lm_head.weight)
    whole = torch.tensor([192, 192])
    generator = Generator(model, tokens.clone(), whole, torch.zeros(2), torch.float32)
    for position in range(191):
        generator.step()
        assert torch.allclose(generator.logits, wanted[:, position], atol=1e-4), position
    assert torch.equal(generator.tokens, tokens)


def test_rows_continue_greedily_where_their_own_prompt_ends() -> None:
    model, prompts = target(), torch.randint(128, (2, 8))
    made = generate(model, prompts, torch.tensor([3, 8]), 64, kind=torch.float32)
    assert torch.equal(made[0, :3], prompts[0, :3])
    assert torch.equal(made[1, :8], prompts[1])
    with torch.no_grad():
        logits = F.linear(model(made, SPARSE).hidden, model.lm_head.weight)
    best = logits.argmax(-1)
    assert torch.equal(made[0, 3:], best[0, 2:-1])
    assert torch.equal(made[1, 8:], best[1, 7:-1])


def test_temperature_belongs_to_the_row() -> None:
    model = target()
    prompts = torch.randint(128, (1, 4)).repeat(2, 1)
    warmth = torch.tensor([0.0, 5.0])
    made = generate(model, prompts, torch.tensor([4, 4]), 32, warmth, torch.float32)
    greedy = generate(model, prompts[:1], torch.tensor([4]), 32, kind=torch.float32)
    assert torch.equal(made[:1], greedy)
    assert not torch.equal(made[0], made[1])
