"""The edit of output projections: exactly the donor's bytes, or the direction gone, or an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from ablit_hub import COMMIT, HEADS, HIDDEN, REPO, config, make_donor, serving
from glm_ablit.fetch import fetch
from glm_ablit.remote import Remote
from glm_exl3.format.donor import EditError
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.layout import Codebook
from glm_exl3.format.sharding import Cut
from glm_exl3.quant import ablit, edits
from glm_exl3.quant.ablit import Ablit, Fingerprint, Projection, Transplant
from glm_exl3.quant.edits import Packing, Placement
from glm_exl3.quant.edits_apply import apply_edits

SHAPE = (HIDDEN, HEADS)


def placed(rank: int = 0, ranks: int = 1, packing: Packing | None = None) -> Placement:
    width = SHAPE[1] // ranks
    inputs = Cut(rank * width, (rank + 1) * width, width)
    return Placement(Cut(0, SHAPE[0], SHAPE[0]), inputs, packing)


@pytest.fixture(autouse=True)
def no_edits() -> Iterator[None]:
    edits.clear()
    yield
    edits.clear()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, torch.Tensor]]:
    """A fetched donor, and its matrices by layer; patterns without NaN."""
    root = tmp_path_factory.mktemp("ablit")
    wanted = make_donor(root / "donor")
    with serving(root / "donor") as hub:
        fetch(Remote(REPO, COMMIT, hub.endpoint), root / "store", (2, 3, 6))
    matrices = {
        int(name.split(".")[3]): torch.from_numpy(values.view("int16")).view(torch.bfloat16)
        for name, values in wanted.items()
    }
    return root / "store", matrices


def edit(store: Path, **changed: object) -> Ablit:
    return Ablit(Transplant.open(store), **{"layers": (2, 3), **changed})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_transplant_is_the_donors_bytes(store, ranks: int, monkeypatch) -> None:
    monkeypatch.setattr(ablit, "MAX_CHANGE", float("inf"))
    shard = torch.zeros(SHAPE[0], SHAPE[1] // ranks, dtype=torch.bfloat16)
    parts = [
        Transplant.open(store[0]).result(3, SHAPE, shard, placed(rank, ranks))
        for rank in range(ranks)
    ]
    whole = torch.cat(parts, 1)
    assert torch.equal(whole.view(torch.int16), store[1][3].view(torch.int16))


def test_another_model_another_dtype_and_another_shape_are_refused(store) -> None:
    method = Transplant.open(store[0])
    with pytest.raises(EditError, match="float16"):
        method.result(3, SHAPE, torch.zeros(SHAPE, dtype=torch.float16), placed())
    with pytest.raises(EditError, match="the matrix bfloat16"):
        shape = (SHAPE[0], 2 * SHAPE[1])
        method.result(3, shape, torch.zeros(shape, dtype=torch.bfloat16), placed())
    with pytest.raises(EditError, match="differs by"):
        edit(store[0]).edit("model.layers.3.self_attn.o_proj", SHAPE, store[1][2], placed())
    nan = torch.full(SHAPE, float("nan"), dtype=torch.bfloat16)
    with pytest.raises(EditError, match="differs by nan"):
        edit(store[0]).edit("model.layers.3.self_attn.o_proj", SHAPE, nan, placed())
    with pytest.raises(EditError, match="layer 5 was asked for"):
        method.tensor(5)


def test_a_packed_matrix_gets_the_donors_values_to_encode(store) -> None:
    shard = torch.zeros(SHAPE)
    packing = Packing(4, Codebook.MCG)
    found = Transplant.open(store[0]).result(2, SHAPE, shard, placed(packing=packing))
    assert found.dtype == torch.float32
    assert torch.equal(found, store[1][2].float())


def test_an_unchanged_matrix_is_left(store) -> None:
    same = store[1][2].clone()
    assert edit(store[0]).edit("model.layers.2.self_attn.o_proj", SHAPE, same, placed()) is None


def test_only_output_projections_of_the_layers_are_wanted(store) -> None:
    one = edit(store[0])
    wanted = [
        name
        for name in (
            "model.layers.2.self_attn.o_proj", "model.layers.3.self_attn.o_proj",
            "model.layers.4.self_attn.o_proj", "model.layers.2.self_attn.q_proj",
            "draft.layers.2.self_attn.o_proj", "model.layers.2.mlp.o_proj",
        )
        if one.wants(name)
    ]  # fmt: skip
    assert wanted == ["model.layers.2.self_attn.o_proj", "model.layers.3.self_attn.o_proj"]
    assert one.roles == {"target", "mtp"}
    assert edit(store[0], with_mtp=False).roles == {"target"}


def text_config(**changed: object) -> SimpleNamespace:
    text = config()["text_config"]
    return SimpleNamespace(**{**text, "num_nextn_predict_layers": 1, **changed})


def test_a_model_of_another_kind_or_with_fewer_layers_is_refused(store) -> None:
    ablit.check_model(edit(store[0], layers=(2, 6)), text_config())
    renamed = [kind.replace("deepseek_sparse", "indexed") for kind in text_config().layer_types]
    ablit.check_model(edit(store[0]), text_config(layer_types=renamed))
    with pytest.raises(EditError, match=r"layer\(s\) 7-9 of ABLIT_LAYERS do not exist"):
        ablit.check_model(edit(store[0], layers=(2, 7, 8, 9)), text_config())
    for key, value in (("hidden_size", 4096), ("layer_types", ["linear_attention"] * 6)):
        with pytest.raises(EditError, match=f"{key} of the donor"):
            ablit.check_model(edit(store[0]), text_config(**{key: value}))


@pytest.fixture
def direction(tmp_path: Path) -> Callable[..., Path]:
    def file(**tensors: torch.Tensor) -> Path:
        save_file(tensors, tmp_path / "r.safetensors")
        return tmp_path / "r.safetensors"

    return file


def test_a_projection_takes_the_component_out(direction, at_rank) -> None:
    """Through vLLM's own layer, on two ranks: at most 1e-3 of it is left."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    vector = torch.randn(256)
    edits.register(Ablit(Projection.open(direction(direction=vector), 1.0), (3,)))
    whole = torch.randn(256, 512).bfloat16()
    parts = []
    for rank in range(2):
        at_rank(rank, 2)
        name = "model.layers.3.self_attn.o_proj"
        layer = RowParallelLinear(512, 256, bias=False, prefix=name, params_dtype=whole.dtype)
        layer.weight.weight_loader(layer.weight, whole)
        model = torch.nn.Module()
        model.add_module("o_proj", layer)
        assert apply_edits(model, "target") == {"ablit": [name]}
        parts.append(layer.weight.data)
    edited = torch.cat(parts, 1).float()
    left = (vector / vector.norm()) @ edited
    before = (vector / vector.norm()) @ whole.float()
    assert float(left.norm() / before.norm()) <= 1e-3


def test_layers_may_have_directions_of_their_own(direction) -> None:
    file = direction(**{"direction.2": torch.eye(4)[0], "direction.3": torch.eye(4)[1]})
    method = Projection.open(file, 1.0)
    shape, place = (4, 2), Placement(Cut(0, 4, 4), Cut(0, 2, 2))
    ones = torch.ones(shape)
    assert method.result(2, shape, ones, place)[:, 0].tolist() == [0, 1, 1, 1]
    assert method.result(3, shape, ones, place)[:, 0].tolist() == [1, 0, 1, 1]
    with pytest.raises(EditError, match="layer 4 is absent"):
        method.result(4, shape, ones, place)


def test_a_direction_of_another_size_or_a_part_of_the_output_is_refused(direction) -> None:
    method = Projection.open(direction(direction=torch.ones(4)), 1.0)
    with pytest.raises(EditError, match="of size 4; the matrix writes 8"):
        place = Placement(Cut(0, 8, 8), Cut(0, 2, 2))
        method.result(0, (8, 2), torch.ones(8, 2), place)
    with pytest.raises(EditError, match="this rank holds 2"):
        place = Placement(Cut(0, 2, 2), Cut(0, 2, 2))
        method.result(0, (4, 2), torch.ones(2, 2), place)


def test_what_is_missing_is_an_error_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(EditError) as caught:
        Transplant.open(tmp_path)
    assert "./start.sh ablit fetch" in caught.value.fix
    with pytest.raises(EditError) as caught:
        Projection.open(tmp_path / "none.safetensors", 1.0)
    assert "./start.sh ablit direction" in caught.value.fix
    (tmp_path / "bad.safetensors").write_bytes(b"12345678")
    with pytest.raises(EditError, match="no file of directions"):
        Projection.open(tmp_path / "bad.safetensors", 1.0)


def test_fingerprints(tmp_path: Path) -> None:
    assert Fingerprint.open(None).judge(3, 0.1, part=False) == "no fingerprint known"
    file = tmp_path / "f.json"
    file.write_text(json.dumps({"layers": {"3": 0.1}, "tolerance": 0.02}))
    known = Fingerprint.open(file)
    assert "within 2%" in known.judge(3, 0.1015, part=False)
    assert "within 25%" in known.judge(3, 0.12, part=True)
    assert known.judge(4, 0.1, part=False) == "no fingerprint known"
    for change, part in ((0.104, False), (0.13, True), (0.0, True)):
        with pytest.raises(EditError, match="its fingerprint says 0.1000"):
            known.judge(3, change, part=part)
    file.write_text("{}")
    with pytest.raises(EditError, match="is no fingerprint"):
        Fingerprint.open(file)


def test_the_environment_asks_for_it(store, monkeypatch, direction) -> None:
    assert ablit.from_environment() is None
    ablit.register()
    assert edits.registered() == ()
    monkeypatch.setenv("GLM_EXL3_ABLIT", "transplant")
    monkeypatch.setenv("GLM_EXL3_ABLIT_SOURCE", str(store[0]))
    monkeypatch.setenv("GLM_EXL3_ABLIT_LAYERS", "2-3")
    ablit.register()
    assert edits.digest_entry() == f"ablit:transplant/2-3/{Transplant.open(store[0]).content}"
    monkeypatch.setenv("GLM_EXL3_ABLIT_PIN", "0" * 16)
    with pytest.raises(EditError, match="pinned is 0000"):
        ablit.from_environment()
    monkeypatch.delenv("GLM_EXL3_ABLIT_PIN")
    monkeypatch.setenv("GLM_EXL3_ABLIT", "proj")
    monkeypatch.setenv("GLM_EXL3_ABLIT_SOURCE", str(direction(direction=torch.ones(4))))
    monkeypatch.setenv("GLM_EXL3_ABLIT_MTP", "0")
    found = ablit.from_environment()
    assert found is not None and isinstance(found.method, Projection)
    assert found.method.alpha == 3.0
    assert found.digest.startswith("projection/2-3-mtp/") and found.digest.endswith("*3")
    monkeypatch.setenv("GLM_EXL3_ABLIT", "silently")
    with pytest.raises(GlmExl3Error, match="must be one of off, transplant, proj"):
        ablit.from_environment()
