"""What a written folder holds, before anybody decodes it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_exl3.format.metadata import CheckpointIndex, check_checkpoint, exl3_modules
from glm_exl3.ref.tiny.build import build_drafter, build_target
from glm_exl3.ref.tiny.folder import shards
from glm_exl3.ref.tiny.recipe import RECIPES, Family, Role
from glm_exl3.ref.tiny.twin import read_tensors

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "processor_config.json",
    "quantization_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
READ_WITHOUT_DEFAULT = {
    "mhc",
    "topk_method",
    "scoring_func",
    "mla_use_nope",
    "indexer_rope_interleave",
    "num_nextn_predict_layers",
    "first_k_dense_replace",
    "linear_attn_config",
    "index_kpool_compress",
}
LAYER = "model.language_model.layers"


def document(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def digest(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


@pytest.fixture(params=["tr3", "full"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_folder_is_complete_and_has_several_shards(folders: dict[str, Path], family: str) -> None:
    names = {path.name for path in folders[family].iterdir()}
    found = {name for name in names if not name.endswith(".safetensors")}
    assert found == FILES
    index = document(folders[family], "model.safetensors.index.json")
    assert names - found == set(index["weight_map"].values())
    assert len(names - found) >= 3
    assert set(index["weight_map"]) == set(read_tensors(folders[family]))


def test_config_has_the_keys_that_vllm_reads_without_a_default(
    folders: dict[str, Path], family: str
) -> None:
    config = document(folders[family], "config.json")
    assert set(config["text_config"]) >= READ_WITHOUT_DEFAULT
    assert config["quantization_config"]["quant_method"] == "exl3"
    assert config["text_config"]["num_nextn_predict_layers"] == 1


def test_tensor_storage_describes_what_is_stored(folders: dict[str, Path], family: str) -> None:
    modules = document(folders[family], "quantization_config.json")["tensor_storage"]
    stored = {k: v for m in modules.values() for k, v in m["stored_tensors"].items()}
    tensors = read_tensors(folders[family])
    assert set(stored) == set(tensors)
    assert all(stored[name]["shape"] == list(t.shape) for name, t in tensors.items())
    recipe = RECIPES[Family(family)]
    expert = modules[f"{LAYER}.1.mlp.experts.0.gate_proj"]
    assert expert["bits_per_weight"] == recipe.packed_bits(Role.EXPERT)
    assert f"{recipe.codebook.value}_multiplier" in expert


def test_headers_are_those_of_valid_packed_modules(folders: dict[str, Path], family: str) -> None:
    check_checkpoint(folders[family])
    modules = exl3_modules(CheckpointIndex.read(folders[family]))
    experts = 3 * 8 * (3 + 1)
    assert len(modules) > experts if family == "full" else len(modules) == experts


def test_tr3_packs_routed_experts_only_and_shares_gate_and_up_scales(
    folders: dict[str, Path],
) -> None:
    tensors = read_tensors(folders["tr3"])
    trellises = [name for name in tensors if name.endswith(".trellis")]
    assert all(".mlp.experts." in name for name in trellises)
    assert f"{LAYER}.0.self_attn.q_proj.weight" in tensors
    expert = f"{LAYER}.2.mlp.experts.5"
    assert torch.equal(tensors[f"{expert}.gate_proj.suh"], tensors[f"{expert}.up_proj.suh"])


def test_full_packs_what_exllamav3_packs(folders: dict[str, Path]) -> None:
    tensors = read_tensors(folders["full"])
    packed = {name.removesuffix(".trellis") for name in tensors if name.endswith(".trellis")}
    assert {
        "lm_head",
        f"{LAYER}.0.self_attn.qkv_proj",
        f"{LAYER}.0.self_attn.o_proj",
        f"{LAYER}.0.mlp.gate_proj",
        f"{LAYER}.3.self_attn.q_a_proj",
        f"{LAYER}.3.self_attn.q_b_proj",
        f"{LAYER}.3.self_attn.kv_a_proj_with_mqa",
        f"{LAYER}.3.self_attn.o_proj",
        f"{LAYER}.3.self_attn.indexer.wq_b",
        f"{LAYER}.3.mlp.shared_experts.down_proj",
        f"{LAYER}.4.eh_proj",
    } <= packed
    dense = ("kv_b_proj", "indexer.wk", "indexer.weights_proj")
    assert all(f"{LAYER}.3.self_attn.{name}.weight" in tensors for name in dense)
    assert f"{LAYER}.0.self_attn.conv1d.weight" in tensors
    assert not any(".q_proj." in name or ".q_conv1d." in name for name in tensors)
    widths = {tensors[f"{name}.trellis"].shape[-1] // 16 for name in packed}
    assert widths == {3, 4, 5, 6}


def test_full_shares_signs_but_not_scales_of_gate_and_up(folders: dict[str, Path]) -> None:
    tensors = read_tensors(folders["full"])
    gate, up = (tensors[f"{LAYER}.1.mlp.experts.3.{x}_proj.suh"] for x in ("gate", "up"))
    assert torch.equal(gate.sign(), up.sign())
    assert not torch.equal(gate, up)


def test_the_same_seed_gives_the_same_bytes(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    build_target(tmp_path / "again", Family(family))
    build_drafter(tmp_path / "drafter", Family(family))
    assert digest(tmp_path / "again") == digest(folders[family])
    assert digest(tmp_path / "drafter") == digest(folders[f"{family}-drafter"])


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_vector_width(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    narrow = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    subprocess.run(
        [
            *(sys.executable, "-m", "glm_exl3.ref.tiny", "--family", "full"),
            *("--out", str(tmp_path / "full"), "--drafter", str(tmp_path / "drafter")),
        ],
        env=os.environ | narrow,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert digest(tmp_path / "full") == digest(folders["full"])
    assert digest(tmp_path / "drafter") == digest(folders["full-drafter"])


def test_another_seed_gives_other_values_of_the_same_shapes(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    build_target(tmp_path, Family.TR3, seed=1)
    first, second = read_tensors(folders["tr3"]), read_tensors(tmp_path)
    assert {n: t.shape for n, t in first.items()} == {n: t.shape for n, t in second.items()}
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])


def test_a_rebuilt_folder_keeps_no_shard_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "model-00099-of-00099.safetensors").write_bytes(b"old")
    build_drafter(tmp_path, Family.TR3)
    assert not (tmp_path / "model-00099-of-00099.safetensors").exists()


def test_shards_are_cut_by_size_and_hold_every_tensor_once() -> None:
    tensors = {f"t{i}": torch.zeros(size) for i, size in enumerate((10, 300, 10, 10))}
    groups = list(shards(tensors, 4 * 30))
    assert [list(group) for group in groups] == [["t0"], ["t1"], ["t2", "t3"]]
