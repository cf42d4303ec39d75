"""The dequantised twin, as transformers loads and runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ref.decode import dequantize
from glm_exl3.ref.tiny.geometry import geometry
from glm_exl3.ref.tiny.tokenizer import token_id
from glm_exl3.ref.tiny.twin import dequantised_state_dict, read_tensors

TEXT = geometry().text
LAYER = "model.language_model.layers"
LONG_PROMPT = 600


@pytest.fixture(scope="module", params=["tr3", "full"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(folders: dict[str, Path], family: str) -> tuple[Any, dict[str, Any]]:
    from glm_exl3.cpu import torchvision

    torchvision.prepare()
    from transformers import Glm5NextForConditionalGeneration

    return Glm5NextForConditionalGeneration.from_pretrained(
        folders[f"{family}-twin"], dtype=torch.float32, output_loading_info=True
    )


def inputs_of(module: torch.nn.Module, model: Any, tokens: torch.Tensor) -> tuple[Any, ...]:
    """Positional and keyword inputs of `module` in one forward pass."""
    seen: list[tuple[Any, ...]] = []
    hook = module.register_forward_pre_hook(lambda _, a, k: seen.append((a, k)), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=tokens)
    hook.remove()
    return seen[0]


def test_fused_projections_are_split_in_the_order_q_k_v(folders: dict[str, Path]) -> None:
    tensors = read_tensors(folders["full"])
    twin = dequantised_state_dict(folders["full"])
    key = f"{LAYER}.1.self_attn"
    parts = [tensors[f"{key}.qkv_proj.{x}"] for x in ("trellis", "suh", "svh")]
    fused = dequantize(*parts, Codebook.MUL1).T.to(torch.bfloat16)
    split = [twin[f"{key}.{x}_proj.weight"] for x in "qkv"]
    assert [part.shape for part in split] == [(TEXT.linear_width, TEXT.hidden_size)] * 3
    assert torch.equal(torch.cat(split), fused)
    convs = [twin[f"{key}.{x}_conv1d.weight"] for x in "qkv"]
    assert torch.equal(torch.cat(convs), tensors[f"{key}.conv1d.weight"])


def test_the_mtp_layer_is_left_out_unless_asked_for(folders: dict[str, Path], family: str) -> None:
    mtp = f"{LAYER}.{TEXT.mtp_layer}."
    assert not any(name.startswith(mtp) for name in dequantised_state_dict(folders[family]))
    assert f"{mtp}eh_proj.weight" in dequantised_state_dict(folders[family], mtp=True)


def test_dense_tensors_keep_their_values(folders: dict[str, Path], family: str) -> None:
    tensors = read_tensors(folders[family])
    for name, value in dequantised_state_dict(folders[family]).items():
        if name in tensors:
            assert torch.equal(value.float(), tensors[name].float()), name


def test_transformers_finds_every_tensor_and_no_other(model: tuple[Any, dict[str, Any]]) -> None:
    info = model[1]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]


def test_fp32_tensors_are_the_same_number_in_bf16(folders: dict[str, Path], family: str) -> None:
    for name, value in read_tensors(folders[family]).items():
        if value.dtype is torch.float32:
            assert torch.equal(value, value.to(torch.bfloat16).float()), name


def test_transformers_processes_text_with_an_image(folders: dict[str, Path], family: str) -> None:
    from glm_exl3.cpu import torchvision

    torchvision.prepare()
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folders[family])
    text = "<|user|><|begin_of_image|><|image|><|end_of_image|>"
    made = processor(text=[text], images=[Image.new("RGB", (84, 56))], return_tensors="pt")
    merged = made["image_grid_thw"].prod() // geometry().vision.spatial_merge_size ** 2
    assert (made["input_ids"] == token_id("<|image|>")).sum() == merged


def test_activations_reach_the_clamp_in_dense_shared_and_routed_experts(
    model: tuple[Any, dict[str, Any]],
) -> None:
    layers = model[0].model.language_model.layers
    tokens = torch.arange(64, 128)[None]
    routed = layers[2].mlp.experts
    weights = routed.gate_up_proj[:, : TEXT.moe_intermediate_size]
    x = inputs_of(routed, model[0], tokens)[0][0]
    gates = {"routed": torch.einsum("th,ewh->tew", x, weights)}
    for name, mlp in (("dense", layers[0].mlp), ("shared", layers[3].mlp.shared_experts)):
        gates[name] = mlp.gate_proj(inputs_of(mlp, model[0], tokens)[0][0])
    for name, gate in gates.items():
        clamped = (gate > TEXT.swiglu_limit).float().mean().item()
        assert 0.002 < clamped < 0.2, (name, clamped)


def test_the_indexer_selects_and_its_choice_depends_on_the_query(
    model: tuple[Any, dict[str, Any]],
) -> None:
    indexer = model[0].model.language_model.layers[3].self_attn.indexer
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, 1800, (1, LONG_PROMPT), generator=generator)
    arguments = inputs_of(indexer, model[0], tokens)[1]
    chosen = indexer(**arguments | {"past_key_values": None})[0]
    last = [set(row[row >= 0].tolist()) for row in chosen[-16:]]
    assert all(len(row) < LONG_PROMPT for row in last)
    assert all(len(row) >= TEXT.index_topk for row in last)
    assert len({frozenset(row - set(range(592, 600))) for row in last}) > 4


def test_every_expert_is_used(model: tuple[Any, dict[str, Any]]) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, 1800, (1, 200), generator=generator)
    for layer in model[0].model.language_model.layers[1:]:
        chosen = inputs_of(layer.mlp.experts, model[0], tokens)[0][1]
        shares = chosen.flatten().bincount(minlength=TEXT.n_routed_experts) / chosen.numel()
        assert shares.min() > 0, shares
