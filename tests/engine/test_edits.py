"""Edited output projections and steering in the engine: the donor's weights, equal on all ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ablit_hub import COMMIT, REPO, serving
from conftest import MINIATURE, Run, make_checkpoint, openings, perform
from equivalence import MAX_WIDE_SHARE
from glm_ablit.fetch import fetch
from glm_ablit.recipe import geometry_of
from glm_ablit.remote import Remote

pytestmark = pytest.mark.engine

LAYERS = (1, 2, 3, 4)
TARGET = MINIATURE / "tr3"
WIDTH = 4 * 256
Env = dict[str, str]


def module(layer: int) -> str:
    return f"model.language_model.layers.{layer}.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A donor: the miniature with changed output projections, as a complete checkpoint."""
    folder = tmp_path_factory.mktemp("repository") / "donor"
    shutil.copytree(TARGET, folder)
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    for layer in LAYERS:
        weight = tensors[module(layer)].float()
        noise = torch.randn(weight.shape, generator=generator) * weight.std()
        tensors[module(layer)] = (weight + 0.2 * noise).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def transplant(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Env:
    """The donor's output projections, fetched from a hub."""
    store = tmp_path_factory.mktemp("store")
    target = geometry_of(json.loads((TARGET / "config.json").read_text()))
    with serving(repository) as hub:
        fetch(Remote(REPO, COMMIT, hub.endpoint), store, LAYERS, target)
    return {
        "GLM_EXL3_ABLIT": "transplant",
        "GLM_EXL3_ABLIT_SOURCE": str(store),
        "GLM_EXL3_ABLIT_LAYERS": "1-4",
    }


@pytest.fixture(scope="module")
def steering(tmp_path_factory: pytest.TempPathFactory) -> Env:
    """A projection behind every layer but the first."""
    path = tmp_path_factory.mktemp("steering") / "vector.gguf"
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("glp.mode", "project")
    writer.add_string("glp.hook_point", "residual_stream_post_layer")
    writer.add_uint32("glp.spec_version", 1)
    generator = np.random.default_rng(5)
    for layer in (1, 2, 3):
        direction = generator.normal(size=WIDTH)
        direction /= np.linalg.norm(direction)
        writer.add_tensor(f"direction.{layer}", direction.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {
        "GLM_EXL3_STEER_VECTOR": str(path),
        "GLM_EXL3_STEER_ALPHA": "1.5",
        "GLM_EXL3_STEER_LAYERS": "1-3",
    }


def engine(model: Path = TARGET, **more: Any) -> dict[str, Any]:
    return {"model": str(model), "enable_prefix_caching": False, **more}


def two_ranks(run: Run, lines: list[dict[str, Any]], env: Env, **more: Any) -> None:
    cut = engine(tensor_parallel_size=2, **more)
    result = run(cut, openings(), 24, reference=lines, wide_share=MAX_WIDE_SHARE, env=env)
    assert not result["comparison"]["broken"], result["comparison"]
    assert result["comparison"]["positions"] >= 8 * 24


@pytest.fixture(scope="module")
def edited(transplant: Env, steering: Env, run_engine: Run) -> list[dict[str, Any]]:
    """What one rank says with both."""
    result = run_engine(engine(), openings(), 24, env={**transplant, **steering})
    lines: list[dict[str, Any]] = result["lines"]
    return lines


def test_two_ranks_say_what_one_says(
    edited: list[dict[str, Any]], transplant: Env, steering: Env, run_engine: Run
) -> None:
    two_ranks(run_engine, edited, {**transplant, **steering})


@pytest.mark.long
def test_a_transplant_is_the_donors_own_checkpoint(
    edited: list[dict[str, Any]], repository: Path, steering: Env, run_engine: Run
) -> None:
    """The same numbers, to the bit."""
    assert run_engine(engine(repository), openings(), 24, env=steering)["lines"] == edited


@pytest.mark.long
def test_drafts_of_an_edited_mtp_block_change_no_text(
    edited: list[dict[str, Any]], transplant: Env, steering: Env, run_engine: Run
) -> None:
    mtp = {"method": "mtp", "num_speculative_tokens": 2}
    result = run_engine(
        engine(speculative_config=mtp), openings(), 24, reference=edited,
        wide_share=MAX_WIDE_SHARE, env={**transplant, **steering},
    )  # fmt: skip
    assert not result["comparison"]["broken"], result["comparison"]


@pytest.mark.long
def test_a_projection_is_equal_on_two_ranks(tmp_path: Path, run_engine: Run) -> None:
    direction = torch.randn(256, generator=torch.Generator().manual_seed(9))
    save_file({"direction": direction}, tmp_path / "r.safetensors")
    env = {
        "GLM_EXL3_ABLIT": "proj",
        "GLM_EXL3_ABLIT_SOURCE": str(tmp_path / "r.safetensors"),
        "GLM_EXL3_ABLIT_LAYERS": "1-3",
        "GLM_EXL3_ABLIT_MTP": "0",
    }
    lines = run_engine(engine(), openings(), 24, env=env)["lines"]
    two_ranks(run_engine, lines, env)


@pytest.mark.long
def test_steered_logits_are_those_of_steered_transformers(
    checkpoints: dict[str, Path], steering: Env, tmp_path: Path
) -> None:
    twin = tmp_path / "twin"
    make_checkpoint("bf16", twin, "--twin-of", "tr3")
    job = {"reference": str(twin), "served": str(checkpoints["tr3"]), "lengths": [5, 60, 300]}
    result = json.loads(perform("steered_parity.py", job, tmp_path, env=steering).read_text())
    assert not result["failures"], result
