from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from glm_exl3.ref import kda as reference_kda
from nano import kda
from nano.checkpoint import fill, sharded, stacked_experts
from nano.drafter import BLOCK, Drafter, DrafterGeometry, block_mask, walk
from nano.export import checkpoint_tensors
from nano.geometry import TextGeometry, nano_geometry
from nano.layers import Indexer, Selection, selected, teach
from nano.model import Nano, Predictor
from nano.optimiser import orthogonalise
from nano.packing import RECIPES, jobs


def small() -> TextGeometry:
    return dataclasses.replace(
        nano_geometry().text, vocab_size=128, n_routed_experts=4, index_topk=64
    )


def models() -> tuple[Nano, Predictor]:
    torch.manual_seed(0)
    return Nano(small()).eval(), Predictor(small()).eval()


def test_chunked_kda_equals_the_reference() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 128, 2, 32, generator=generator) for _ in range(3))
    g = -5 * torch.rand(2, 128, 2, 32, generator=generator)
    beta = torch.rand(2, 128, 2, generator=generator)
    out = kda.chunked(q, k, v, g, beta)
    for row in range(2):
        wanted, _ = reference_kda.chunked(
            kda.unit(q[row]) * 32**-0.5, kda.unit(k[row]), v[row], g[row], beta[row],
            torch.zeros(2, 32, 32),
        )  # fmt: skip
        assert torch.allclose(out[row], wanted, atol=2e-5)


def test_chunked_kda_has_finite_gradients_at_the_strongest_decay() -> None:
    inputs = [torch.randn(1, 64, 1, 16, requires_grad=True) for _ in range(3)]
    g = torch.full((1, 64, 1, 16), -5.0, requires_grad=True)
    kda.chunked(*inputs, g, torch.ones(1, 64, 1)).square().sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (*inputs, g) if x.grad is not None)


def test_selection_keeps_the_best_pools_and_the_incomplete_one() -> None:
    score = torch.full((1, 10, 2), float("-inf"))
    score[0, 3:, 0] = 1.0
    score[0, 7:, 1] = 2.0
    mask = selected(score, pool=4, count=1)[0]
    assert mask[2].nonzero().flatten().tolist() == [0, 1, 2]
    assert mask[5].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert mask[8].nonzero().flatten().tolist() == [4, 5, 6, 7, 8]


def test_the_indexer_learns_where_attention_goes() -> None:
    torch.manual_seed(0)
    indexer = Indexer(small())
    x, residual = torch.randn(1, 96, 256), torch.randn(1, 96, 256)
    q, k = torch.randn(1, 2, 96, 16), torch.randn(1, 2, 96, 16)
    k[:, :, 32:48] += 2 * q.mean(2, keepdim=True)
    losses = []
    for _ in range(6):
        loss, _ = teach(indexer(x, residual), q, k, 16, 4)
        indexer.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in indexer.parameters():
                parameter -= 0.1 * parameter.grad / parameter.grad.norm().clamp_min(1e-9)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_sparse_attention_equals_dense_while_all_pools_fit() -> None:
    target, _ = models()
    tokens = torch.randint(0, 128, (1, 64))
    with torch.no_grad():
        sparse = target(tokens, Selection(sparse=True)).hidden
        dense = target(tokens, Selection()).hidden
    assert torch.allclose(sparse, dense, atol=1e-5)


def test_a_checkpoint_fills_the_modules_it_came_from() -> None:
    target, predictor = models()
    tensors = checkpoint_tensors(target, predictor, 4)
    assert "model.language_model.layers.4.shared_head.norm.weight" in tensors
    assert "model.language_model.layers.2.mlp.experts.3.up_proj.weight" in tensors
    assert tensors["model.language_model.layers.0.hc_attn_fn"].dtype is torch.float32
    other = Nano(small()), Predictor(small())
    fill(tensors, *other)
    again = checkpoint_tensors(*other, 4)
    assert set(again) == set(tensors)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_stacking_undoes_splitting_of_experts() -> None:
    parts = {
        f"m.mlp.experts.{index}.{kind}_proj.weight": torch.full((2, 3), float(index))
        for index in range(2)
        for kind in ("gate", "up", "down")
    }
    stacked = stacked_experts(parts)
    assert stacked["m.mlp.experts.gate_up_proj"].shape == (2, 4, 3)
    assert stacked["m.mlp.experts.down_proj"][1, 0, 0] == 1.0


def test_shards_stay_below_the_limit_and_lose_nothing() -> None:
    tensors = {f"t{n}": torch.zeros(100) for n in range(7)}
    shards = sharded(tensors, limit=900)
    assert [len(shard) for shard in shards] == [2, 2, 2, 1]
    assert {name for shard in shards for name in shard} == set(tensors)


def test_blocks_see_their_own_past_and_themselves() -> None:
    mask = block_mask(torch.tensor([3, 5]), torch.arange(8))
    assert mask.shape == (2 * BLOCK, 8 + 2 * BLOCK)
    assert mask[0].nonzero().flatten().tolist() == [0, 1, 2, *range(8, 8 + BLOCK)]
    assert mask[-1].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, *range(8 + BLOCK, 24)]


def test_drafts_do_not_depend_on_other_blocks() -> None:
    torch.manual_seed(2)
    geometry = DrafterGeometry.of(nano_geometry())
    drafter = Drafter(geometry).eval()
    taps = [torch.randn(1, 64, 256) for _ in range(5)]
    tokens = torch.randint(0, 1000, (1, 64))
    embedding, head = torch.randn(1920, 256), torch.randn(1920, 256)

    def drafts(anchors: list[int]) -> torch.Tensor:
        places = torch.tensor(anchors)
        hidden = drafter(drafter.read(taps), tokens, places, embedding)
        return walk(drafter, hidden, tokens[:, places], head)

    assert torch.equal(drafts([10, 20, 40])[:, 1], drafts([20])[:, 0])


def test_orthogonalised_updates_have_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 32, 64)).float())
    assert values.min() > 0.5
    assert values.max() < 1.5


@pytest.mark.parametrize(("name", "packed"), [("tr3", 24 * 3), ("full-4bpw", 105)])
def test_recipes_pack_what_their_family_packs(name: str, packed: int) -> None:
    target, predictor = Nano(nano_geometry().text), Predictor(nano_geometry().text)
    tensors = checkpoint_tensors(target, predictor, 4)
    found = jobs(tensors, RECIPES[name])
    modules = [module for job in found for module in job.modules]
    assert len(modules) == packed
    assert not any("kv_b_proj" in module or module.endswith("mlp.gate") for module in modules)
    fused = [job for job in found if job.modules[0].endswith("qkv_proj")]
    assert len(fused) == (3 if name.startswith("full") else 0)


MODEL = Path(__file__).parents[2] / "bench" / "nano" / "model"


@pytest.mark.parametrize("name", ["tr3", "full-4bpw", "full-3bpw", "drafter"])
def test_committed_folders_are_complete(name: str) -> None:
    from glm_exl3.format.metadata import CheckpointIndex, exl3_modules

    index = CheckpointIndex.read(MODEL / name)
    packed = {"tr3": 72, "full-4bpw": 105, "full-3bpw": 105, "drafter": 0}[name]
    assert len(exl3_modules(index)) == packed
    for other in ("tokenizer.json", "chat_template.jinja", "config.json"):
        assert (MODEL / name / other).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("index_topk", [64, 512])
def test_the_training_model_equals_transformers(tmp_path: Path, index_topk: int) -> None:
    from glm_exl3.cpu.torchvision import define_operators

    define_operators()
    from transformers import Glm5NextForConditionalGeneration

    from glm_exl3.ref.tiny.configs import target_config
    from glm_exl3.ref.tiny.folder import write_folder

    geometry = nano_geometry()
    text = dataclasses.replace(geometry.text, index_topk=index_topk)
    torch.manual_seed(3)
    target = Nano(text).eval()
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "compress" in name or "weights_proj" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    tensors = checkpoint_tensors(target, None, 4)
    config = target_config(dataclasses.replace(geometry, text=text), None)
    config["text_config"]["num_nextn_predict_layers"] = 0
    write_folder(tmp_path, tensors, config)
    reference = Glm5NextForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 1800, (1, 320))
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(parameter.bfloat16().float())
        for buffer in target.buffers():
            buffer.copy_(buffer.bfloat16().float())
        wanted = reference.eval()(input_ids=tokens).logits
        logits = target.lm_head(target(tokens, Selection(sparse=True)).hidden)
    assert torch.allclose(logits, wanted, atol=1e-4)
