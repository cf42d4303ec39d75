"""No damaged checkpoint loads: every mutation of a real tiny one ends in an error that names it.

Mutations are made on disk, and the whole way is taken: configuration, model, weights.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm_exl3.format.errors import FormatError, GlmExl3Error

pytestmark = pytest.mark.slow

INDEX = "model.safetensors.index.json"
LAYERS = "model.language_model.layers"


class Checkpoint:
    """A folder whose tensors can be edited; index and shards stay consistent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def weight_map(self) -> dict[str, str]:
        return json.loads((self.folder / INDEX).read_text())["weight_map"]

    def file_of(self, name: str) -> Path:
        return self.folder / self.weight_map[name]

    def names(self, pattern: str = "") -> list[str]:
        return sorted(n for n in self.weight_map if re.search(pattern, n))

    @contextmanager
    def edit(self, name: str) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of the shard that holds `name`, written back with the index."""
        shard = self.weight_map[name]
        tensors = load_file(self.folder / shard)
        yield tensors
        save_file(tensors, self.folder / shard, {"format": "pt"})
        weight_map = {n: f for n, f in self.weight_map.items() if f != shard}
        weight_map |= dict.fromkeys(tensors, shard)
        (self.folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        self.forget_metadata()

    def forget_metadata(self) -> None:
        """Without quantization_config.json, so that only tensors can give a mutation away."""
        (self.folder / "quantization_config.json").unlink(missing_ok=True)

    def change(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with self.edit(name) as tensors:
            tensors[name] = change(tensors[name]).contiguous()

    def drop(self, name: str) -> None:
        with self.edit(name) as tensors:
            del tensors[name]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        with self.edit(self.names()[0]) as tensors:
            tensors[name] = tensor

    def configure(self, change: Callable[[dict], object]) -> None:
        path = self.folder / "config.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))


@pytest.fixture
def refuses(build) -> Callable[[Checkpoint], GlmExl3Error]:
    """The error with which a checkpoint is refused."""

    def run(checkpoint: Checkpoint) -> GlmExl3Error:
        with pytest.raises(GlmExl3Error) as caught:
            build(checkpoint.folder)
        return caught.value

    return run


@pytest.fixture
def full(copied) -> Checkpoint:
    return Checkpoint(copied("full"))


def names(error: GlmExl3Error, checkpoint: Checkpoint, tensor: str) -> None:
    assert isinstance(error, FormatError)
    assert error.tensor == tensor
    assert tensor in str(error)
    assert error.file is None or str(checkpoint.folder) in error.file


def test_missing_shard(full: Checkpoint, refuses) -> None:
    victim = full.folder / "model-00002-of-00005.safetensors"
    victim.unlink()
    assert victim.name in str(refuses(full))


def test_truncated_shard(full: Checkpoint, refuses) -> None:
    victim = full.folder / "model-00002-of-00005.safetensors"
    victim.write_bytes(victim.read_bytes()[:-100])
    assert victim.name in str(refuses(full))


def test_shard_that_is_not_safetensors(full: Checkpoint, refuses) -> None:
    victim = full.folder / "model-00001-of-00005.safetensors"
    victim.write_bytes(struct.pack("<Q", 5) + b"hello" + victim.read_bytes()[13:])
    assert victim.name in str(refuses(full))


@pytest.mark.parametrize(
    "extra",
    [
        f"{LAYERS}.0.self_attn.q_proj.weight_scale",
        f"{LAYERS}.1.mlp.experts.8.gate_proj.weight",
        f"{LAYERS}.1.mlp.something.weight",
        f"{LAYERS}.4.mlp.something.weight",
        f"{LAYERS}.4.eh_proj.weight_scale",
        f"{LAYERS}.7.input_layernorm.weight",
        f"{LAYERS}.3.self_attn.o_proj.bias",
        "model.visual.blocks.0.something.weight",
        "somewhere.else.weight",
        "lm_head.weight",
    ],
)
def test_a_tensor_nobody_takes(extra: str, full: Checkpoint, refuses) -> None:
    full.add(extra, torch.ones(128, 128, dtype=torch.bfloat16))
    names(refuses(full), full, extra)


def test_a_known_useless_tensor_can_be_let_through(
    full: Checkpoint, build, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.add("somewhere.else.weight", torch.ones(4))
    monkeypatch.setenv("GLM_EXL3_IGNORE_TENSORS", r"^somewhere\.else")
    assert build(full.folder).language_model.lm_head.exl3.terms


@pytest.mark.parametrize(
    "gone",
    [
        f"{LAYERS}.0.self_attn.conv1d.weight",
        f"{LAYERS}.0.self_attn.b_proj.weight",
        f"{LAYERS}.1.self_attn.dt_bias",
        f"{LAYERS}.2.hc_ffn_fn",
        f"{LAYERS}.2.mlp.gate.e_score_correction_bias",
        f"{LAYERS}.3.self_attn.kv_b_proj.weight",
        f"{LAYERS}.3.self_attn.indexer.wk.weight",
        f"{LAYERS}.3.self_attn.indexer.k_norm.bias",
        f"{LAYERS}.3.input_layernorm.weight",
        "model.language_model.norm.weight",
        "model.language_model.embed_tokens.weight",
    ],
)
def test_a_missing_dense_tensor_is_named(gone: str, full: Checkpoint, refuses) -> None:
    known = full.names(re.escape(gone).replace("hc_ffn_fn", "hc_ffn(_|.)fn"))
    assert known, gone
    full.drop(known[0])
    error = refuses(full)
    stem = known[0].rpartition(".")[0].replace("conv1d", "q_conv1d")
    assert isinstance(error, FormatError)
    assert error.tensor in (known[0], f"{stem}.weight")


@pytest.mark.parametrize(
    "gone", ["model.visual.blocks.0.attn.qkv.weight", "model.visual.blocks.1.mlp.up_proj.bias"]
)
def test_a_missing_vision_tensor_is_named_where_the_tower_is_built(
    gone: str, full: Checkpoint, build
) -> None:
    full.drop(gone)
    with pytest.raises(FormatError, match=re.escape(gone)):
        build(full.folder, language_model_only=False)


@pytest.mark.parametrize("leaf", ["trellis", "suh", "svh"])
@pytest.mark.parametrize(
    "module",
    [
        "lm_head",
        f"{LAYERS}.0.self_attn.qkv_proj",
        f"{LAYERS}.1.mlp.experts.3.up_proj",
        f"{LAYERS}.3.self_attn.q_a_proj",
        f"{LAYERS}.4.eh_proj",
    ],
)
def test_a_missing_packed_tensor_is_named(
    module: str, leaf: str, full: Checkpoint, refuses
) -> None:
    full.drop(f"{module}.{leaf}")
    names(refuses(full), full, f"{module}.{leaf}")


@pytest.mark.parametrize(
    "module", [f"{LAYERS}.0.self_attn.o_proj", f"{LAYERS}.0.self_attn.qkv_proj"]
)
def test_a_missing_packed_module_is_named(module: str, full: Checkpoint, refuses) -> None:
    for name in full.names(rf"^{re.escape(module)}\."):
        full.drop(name)
    error = refuses(full)
    assert isinstance(error, FormatError)
    assert error.tensor.rpartition(".")[0] in (module, module.replace("qkv_proj", "q_proj"))


def test_a_missing_marker_is_another_codebook(full: Checkpoint, refuses) -> None:
    full.drop(f"{LAYERS}.1.mlp.experts.0.gate_proj.mul1")
    assert "experts.0" in str(refuses(full)) or "experts.1" in str(refuses(full))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t[:-8], "in_features|needs|stores|scales"),
        (lambda t: t[..., :-16], "K|bits|stores"),
        (lambda t: t[..., :40].repeat(1, 1, 4), "K = 10"),
        (lambda t: t[:-1], "128|scales"),
        (lambda t: t.reshape(-1, t.shape[-1]), "shape"),
    ],
    ids=["k", "bits", "range", "block", "dims"],
)
def test_a_wrong_trellis_shape(change, word: str, full: Checkpoint, refuses) -> None:
    name = f"{LAYERS}.3.self_attn.q_b_proj.trellis"
    if word == "K|bits|stores":
        name = f"{LAYERS}.1.mlp.experts.2.up_proj.trellis"
    full.change(name, change)
    error = refuses(full)
    assert name.rpartition(".")[0] in str(error)


@pytest.mark.parametrize("value", [0, 0x0BAD, -1])
def test_a_wrong_marker_value(value: int, full: Checkpoint, refuses) -> None:
    name = f"{LAYERS}.0.self_attn.o_proj.mul1"
    full.change(name, lambda t: torch.full_like(t, value))
    names(refuses(full), full, name)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYERS}.1.mlp.experts.7.down_proj.svh",
        f"{LAYERS}.0.self_attn.qkv_proj.suh",
        "lm_head.svh",
    ],
)
def test_non_finite_scales(name: str, full: Checkpoint, refuses) -> None:
    def spoil(scales: torch.Tensor) -> torch.Tensor:
        scales = scales.clone()
        scales[5] = float("inf")
        return scales

    full.change(name, spoil)
    names(refuses(full), full, name)


def test_a_dense_weight_with_nan(full: Checkpoint, refuses) -> None:
    name = f"{LAYERS}.3.self_attn.kv_b_proj.weight"
    full.change(name, lambda t: t * float("nan"))
    assert "kv_b_proj" in str(refuses(full))


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYERS}.3.self_attn.kv_b_proj.weight",
        "model.language_model.embed_tokens.weight",
        f"{LAYERS}.0.self_attn.b_proj.weight",
        f"{LAYERS}.0.input_layernorm.weight",
    ],
)
def test_a_dense_weight_of_another_size(name: str, full: Checkpoint, refuses) -> None:
    full.change(name, lambda t: torch.cat([t, t]))
    names(refuses(full), full, name)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_a_dense_weight_of_another_kind(dtype: torch.dtype, full: Checkpoint, refuses) -> None:
    name = f"{LAYERS}.2.mlp.gate.weight"
    full.change(name, lambda t: t.to(dtype))
    names(refuses(full), full, name)


@pytest.mark.parametrize("key", ["mhc", "topk_method", "mla_use_nope", "num_nextn_predict_layers"])
def test_a_config_that_lacks_a_key(key: str, full: Checkpoint, refuses) -> None:
    full.configure(lambda document: document["text_config"].pop(key))
    error = refuses(full)
    assert key in str(error)
    assert "config.json" in str(error)


@pytest.mark.parametrize(
    ("packed", "gone"),
    [
        (False, "layers.0.self_attn.v_proj.weight"),
        (False, "fc.weight"),
        (False, "layers.1.attention_conv.base_kernel"),
        (True, "layers.1.mlp.gate_proj.trellis"),
        (True, "candidate_selector.hidden_projection.weight"),
    ],
)
def test_a_drafter_that_lacks_a_tensor(packed: bool, gone: str, pristine, drafter, build) -> None:
    checkpoint = Checkpoint(drafter(packed=packed))
    checkpoint.drop(gone)
    speculation = {
        "method": "dflash",
        "model": str(checkpoint.folder),
        "num_speculative_tokens": 3,
    }
    with pytest.raises(FormatError, match=re.escape(gone)):
        build(pristine("full"), draft=True, speculative_config=speculation)


@pytest.mark.parametrize("leaf", ["trellis", "weight"])
def test_a_drafter_tensor_nobody_takes(leaf: str, pristine, drafter, build) -> None:
    checkpoint = Checkpoint(drafter(packed=False))
    checkpoint.add(f"layers.0.something.{leaf}", torch.ones(8, 8, 16, dtype=torch.int16))
    speculation = {
        "method": "dflash",
        "model": str(checkpoint.folder),
        "num_speculative_tokens": 3,
    }
    with pytest.raises(FormatError, match=r"layers\.0\.something"):
        build(pristine("full"), draft=True, speculative_config=speculation)


def test_no_random_mutation_loads(copied, build) -> None:
    """Seeded random damage to random tensors: loading must fail, whatever was hit."""
    chance = random.Random(1)
    kinds = {
        "drop": lambda c, n: c.drop(n),
        "rename": lambda c, n: (c.add(n + "x", torch.ones(2)), c.drop(n)),
        "truncate": lambda c, n: c.change(n, lambda t: t[: t.shape[0] // 2]),
        "widen": lambda c, n: c.change(n, lambda t: torch.cat([t, t], -1)),
    }
    survivors = []
    for family in ("full", "tr3"):
        for kind, mutate in kinds.items():
            for _ in range(3):
                checkpoint = Checkpoint(copied(family))
                served = r"layers\.[0-3]\.|^lm_head|\.norm\.|embed"
                pool = [n for n in checkpoint.names(served) if not n.endswith(("mcg", "mul1"))]
                name = chance.choice(pool)
                mutate(checkpoint, name)
                try:
                    build(checkpoint.folder)
                except GlmExl3Error:
                    continue
                survivors.append((family, kind, name))
    assert not survivors
