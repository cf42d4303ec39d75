"""Header-only checkpoints name exactly what real ones hold, and random values keep unit scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm_exl3.dummy import cli
from glm_exl3.dummy.folder import write_drafter, write_target
from glm_exl3.dummy.geometry import rank_geometry, real_geometry
from glm_exl3.dummy.loader import fill_experts, fill_linear
from glm_exl3.dummy.values import DeviceStreams, fill_dense, kind_of
from glm_exl3.format.layout import Codebook
from glm_exl3.format.metadata import CheckpointIndex, check_checkpoint
from glm_exl3.format.sharding import Cut
from glm_exl3.quant.facts import read_facts
from glm_exl3.quant.moe import ExpertCollector, ExpertGeometry
from glm_exl3.quant.names import Source
from glm_exl3.quant.params import LinearCollector
from glm_exl3.quant.shards import Geometry, make_shard
from glm_exl3.ref.decode import dequantize
from glm_exl3.ref.tiny.build import build_drafter, build_target
from glm_exl3.ref.tiny.geometry import geometry
from glm_exl3.ref.tiny.recipe import Family

LAYER = "model.language_model.layers.1"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("dummy")
    made = {}
    for family in (Family.TR3, Family.FULL):
        made[family.value] = root / family.value
        write_target(made[family.value], family, geometry())
    return made


def described(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = CheckpointIndex.read(folder).tensors
    return {name: (entry.dtype, entry.shape) for name, entry in tensors.items()}


@pytest.mark.parametrize("family", ["tr3", "full"])
def test_headers_are_those_of_a_checkpoint_with_weights(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    build_target(tmp_path / "real", Family(family))
    assert described(folders[family]) == described(tmp_path / "real")
    dummy, real = (check_checkpoint(f).modules for f in (folders[family], tmp_path / "real"))
    assert dummy == real


@pytest.mark.parametrize("packed", [False, True])
def test_the_drafter_has_the_headers_of_one_with_weights(tmp_path: Path, packed: bool) -> None:
    build_drafter(tmp_path / "real", Family.FULL, packed=packed)
    write_drafter(tmp_path / "dummy", geometry(), packed=packed)
    assert described(tmp_path / "dummy") == described(tmp_path / "real")


def test_a_sparse_file_takes_no_room(folders: dict[str, Path]) -> None:
    info = (folders["full"] / "model.safetensors").stat()
    assert info.st_size > 10 << 20
    assert info.st_blocks * 512 < 1 << 20


def test_one_rank_has_the_shares_of_the_whole() -> None:
    whole, half = real_geometry().text, rank_geometry(real_geometry(), 2).text
    assert (half.moe_intermediate_size, half.num_attention_heads) == (1024, 32)
    assert (half.hidden_size, half.n_routed_experts) == (whole.hidden_size, 288)
    with pytest.raises(ValueError, match="does not divide by 3"):
        rank_geometry(real_geometry(), 3)


def test_the_command_writes_target_and_drafter(tmp_path: Path) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    arguments = ["--family", "tr3", "--layers", "4", "--experts", "8", "--ranks", "2"]
    assert cli.main([*arguments, "--out", str(target), "--drafter", str(drafter)]) == 0
    layouts = check_checkpoint(target).modules
    gate = layouts["model.language_model.layers.3.mlp.experts.0.gate_proj"]
    assert (gate.in_features, gate.out_features, gate.bits) == (4096, 1024, 4)
    assert len(check_checkpoint(drafter).modules) == 36


def linear_matrices(folder: Path, seed: int = 0):
    """q, k and v of a KDA layer, and the o_proj."""
    facts = read_facts(folder)
    width, hidden = geometry().text.linear_width, geometry().text.hidden_size
    fused = f"{LAYER}.self_attn.qkv_proj"
    shards = [
        make_shard(facts, Geometry(key, hidden, width), Source(fused, key, 3)) for key in range(3)
    ]
    collector = LinearCollector(shards, facts, CPU, torch.bfloat16)
    fill_linear(collector, DeviceStreams(seed, CPU))
    return collector.finish()


def test_parts_of_a_fused_matrix_share_scales_and_nothing_else(folders: dict[str, Path]) -> None:
    q, k, v = linear_matrices(folders["full"])
    assert q.joins(k)
    assert q.joins(v)
    assert not torch.equal(q.trellis, k.trellis)


def test_packed_matrices_have_unit_gain(folders: dict[str, Path]) -> None:
    for matrix in linear_matrices(folders["full"]):
        weight = dequantize(matrix.trellis, matrix.suh, matrix.svh, matrix.codebook)
        x = torch.randn(64, weight.shape[0], generator=torch.Generator().manual_seed(1))
        assert float((x @ weight).std()) == pytest.approx(1.0, abs=0.05)


def test_values_depend_on_seed_and_name_alone(folders: dict[str, Path]) -> None:
    first, again, other = (linear_matrices(folders["full"], seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first.trellis, again.trellis)
    assert torch.equal(first.suh, again.suh)
    assert not torch.equal(first.trellis, other.trellis)


@pytest.mark.parametrize("family", ["tr3", "full"])
def test_experts_are_complete_and_share_scales_where_the_family_does(
    folders: dict[str, Path], family: str
) -> None:
    facts, text = read_facts(folders[family]), geometry().text
    names = [f"{LAYER}.mlp.experts.{i}" for i in range(text.n_routed_experts)]
    width = text.moe_intermediate_size
    sizes = ExpertGeometry(text.hidden_size, width, Cut(0, width, width), len(names))
    collector = ExpertCollector(sizes, names, facts, CPU)
    with pytest.raises(Exception, match="did not deliver"):
        collector.check_complete()
    fill_experts(collector, DeviceStreams(0, CPU))
    collector.check_complete()
    w13, w2 = collector.w13, collector.w2
    assert torch.equal(w13.suh[:, 0], w13.suh[:, 1]) == (w13.codebook is Codebook.MCG)
    down = dequantize(w2.trellis[3], w2.suh[3], w2.svh[3], w2.codebook)
    assert float(down.std() * width**0.5) == pytest.approx(1.0, abs=0.05)
    words = w13.trellis.to(torch.int32) & 0xFFFF
    ones = [float(((words >> bit) & 1).float().mean()) for bit in range(16)]
    assert all(0.49 < share < 0.51 for share in ones)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.input_layernorm.weight", "ones"),
        ("model.layers.3.self_attn.indexer.k_norm.bias", "zeros"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "zeros"),
        ("model.layers.3.mlp.gate.weight", "linear"),
        ("model.layers.0.hc_attn_fn", "mixing"),
        ("model.layers.0.hc_attn_scale", "ones"),
        ("model.layers.0.self_attn.q_conv1d.weight", "half"),
        ("model.layers.0.self_attn.A_log", "half"),
        ("model.layers.0.self_attn.dt_bias", "slow"),
        ("model.embed_tokens.weight", "unit"),
    ],
)
def test_dense_parameters_get_what_their_name_asks_for(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    value = torch.full((64, 256), torch.nan, dtype=torch.bfloat16)
    fill_dense(DeviceStreams(0, CPU), name, value)
    assert torch.isfinite(value).all()
