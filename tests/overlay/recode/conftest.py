"""A small checkpoint folder with one dense matrix of every group."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from glm_exl3.quant import edits

Tensors = dict[str, torch.Tensor]
STEM = "model.language_model.layers"


def matrices() -> dict[str, tuple[int, int]]:
    """Dense modules by name: (out, in). Layer 0 is KDA and dense, layer 1 MLA and sparse."""
    return {
        f"{STEM}.0.self_attn.q_proj": (128, 128),
        f"{STEM}.0.self_attn.k_proj": (128, 128),
        f"{STEM}.0.self_attn.v_proj": (256, 128),
        f"{STEM}.0.self_attn.o_proj": (128, 256),
        f"{STEM}.0.mlp.gate_proj": (128, 128),
        f"{STEM}.0.mlp.up_proj": (128, 128),
        f"{STEM}.0.mlp.down_proj": (128, 128),
        f"{STEM}.1.self_attn.q_a_proj": (128, 128),
        f"{STEM}.1.self_attn.kv_a_proj_with_mqa": (64, 128),
        f"{STEM}.1.self_attn.o_proj": (128, 128),
        f"{STEM}.1.mlp.shared_experts.down_proj": (128, 128),
        f"{STEM}.2.eh_proj": (128, 256),
        "lm_head": (256, 128),
    }


@pytest.fixture(name="matrices")
def dense_modules() -> dict[str, tuple[int, int]]:
    return matrices()


@pytest.fixture(autouse=True)
def no_edits() -> Iterator[None]:
    edits.clear()
    yield
    edits.clear()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Write the folder; `extra` tensors replace or join its own."""

    def write(extra: Tensors | None = None) -> Path:
        from glm_exl3.quant.facts import read_facts

        read_facts.cache_clear()
        random = torch.Generator().manual_seed(3)
        tensors = {
            f"{name}.weight": torch.randn(shape, generator=random).bfloat16()
            for name, shape in matrices().items()
        }
        tensors[f"{STEM}.0.self_attn.A_log"] = torch.zeros(2)
        tensors[f"{STEM}.1.mlp.gate.weight"] = torch.randn(8, 128, generator=random)
        tensors |= extra or {}
        folder = tmp_path / "checkpoint"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        config = {"architectures": ["SomeModel"], "num_hidden_layers": 2}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write
