"""Matrices recoded to EXL3: made once, resumed, refused when stale or partial, seen as packed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.layout import Codebook
from glm_exl3.format.recode import Recode
from glm_exl3.format.recode_cache import MANIFEST
from glm_exl3.quant import edits
from glm_exl3.quant.edits import Placement
from glm_exl3.quant.facts import read_facts
from glm_exl3.quant.recode_cache import folder_for, recoded_tensors, with_recoded
from glm_exl3.recode import cli, make
from glm_exl3.ref.decode import dequantize
from glm_exl3.ref.quantize import Exl3Tensors

STEM = "model.language_model.layers"
EXL3 = Recode("exl3", bits=4)
CPU = torch.device("cpu")
SMALL = f"{STEM}.1.self_attn.kv_a_proj_with_mqa"


def any_code(weight: torch.Tensor, bits: int, codebook: Codebook, **_: object) -> Exl3Tensors:
    """Packed tensors of the right shapes that have nothing to do with the weight."""
    k, n = weight.shape
    random = torch.Generator().manual_seed(k + n)
    shape = (k // 16, n // 16, 16 * bits)
    trellis = torch.randint(-(2**15), 2**15, shape, generator=random).to(torch.int16)
    return Exl3Tensors(trellis, torch.ones(k).half(), torch.ones(n).half(), codebook)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding without an encoder."""
    monkeypatch.setattr(make, "quantize_datafree", any_code)


def make_all(folder: Path, recode: Recode = EXL3, **more: bool) -> list[int]:
    """Tiles of every unit that was made."""
    tiles: list[int] = []
    make.run(make.plan(read_facts(folder), recode), recode, CPU, tiles.append, **more)
    return tiles


def test_the_checkpoint_is_seen_packed(quick, checkpoint, matrices) -> None:
    folder = checkpoint()
    facts = read_facts(folder)
    tiles = make_all(folder)
    assert sum(tiles) == sum(a * b for n, (a, b) in matrices.items() if n != SMALL) // 256
    seen = with_recoded(facts, EXL3)
    assert seen.recoded.keys() == matrices.keys() - {SMALL}
    assert seen.modules.keys() == seen.recoded.keys()
    assert f"{SMALL}.weight" in seen.index.tensors
    assert "lm_head.weight" not in seen.index.tensors
    layout = seen.modules["lm_head"]
    assert (layout.out_features, layout.in_features, layout.bits) == (256, 128, 4)
    streamed = dict(recoded_tensors(seen))
    assert streamed["lm_head.trellis"].shape == (8, 16, 64)
    assert torch.equal(
        streamed[f"{STEM}.0.self_attn.q_proj.suh"], streamed[f"{STEM}.0.self_attn.v_proj.suh"]
    )
    assert with_recoded(facts, Recode("fp8")) is facts


def test_a_stopped_run_goes_on_and_leaves_nothing_half_done(
    quick, checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint()
    units = len(make.plan(read_facts(folder), EXL3).pending)
    made: list[int] = []

    def stop(tiles: int) -> None:
        made.append(tiles)
        if len(made) == 3:
            raise KeyboardInterrupt

    for _ in range(2):
        made.clear()
        with pytest.raises(KeyboardInterrupt):
            make.run(make.plan(read_facts(folder), EXL3), EXL3, CPU, stop)
        with pytest.raises(GlmExl3Error, match=r"is not in it.*\./start\.sh recode"):
            with_recoded(read_facts(folder), EXL3)
    assert len(make_all(folder)) == units - 6
    assert with_recoded(read_facts(folder), EXL3).recoded
    assert make_all(folder) == []
    where = folder_for(read_facts(folder), EXL3)
    assert not list(where.glob("*.part")) + list(where.glob("*.tmp"))


def test_a_failure_while_encoding_keeps_the_units_before_it(checkpoint, monkeypatch) -> None:
    folder, calls = checkpoint(), []

    def failing(*arguments: Any, **more: Any) -> Exl3Tensors:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("out of memory")
        return any_code(*arguments, **more)

    monkeypatch.setattr(make, "quantize_datafree", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        make_all(folder)
    done = make.plan(read_facts(folder), EXL3).done
    assert len(done) == 3
    assert all((folder_for(read_facts(folder), EXL3) / unit.file).exists() for unit in done)


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_partial_cache_is_refused_with_the_command(damage: str, quick, checkpoint) -> None:
    folder = checkpoint()
    make_all(folder)
    victim = folder_for(read_facts(folder), EXL3) / "lm_head.safetensors"
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(GlmExl3Error, match=r"lm_head\.safetensors .*\./start\.sh recode"):
        with_recoded(read_facts(folder), EXL3)
    assert len(make_all(folder)) == 1
    assert with_recoded(read_facts(folder), EXL3).recoded


def test_changed_bytes_are_found_by_verify(quick, checkpoint) -> None:
    folder = checkpoint()
    make_all(folder)
    victim = folder_for(read_facts(folder), EXL3) / "lm_head.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    assert not make.plan(read_facts(folder), EXL3).pending
    assert make.plan(read_facts(folder), EXL3, verify=True).pending == (("lm_head",),)


def test_other_weights_settings_or_edits_are_another_cache(quick, checkpoint) -> None:
    folder = checkpoint()
    make_all(folder)
    facts = read_facts(folder)
    places = {folder_for(facts, EXL3), folder_for(facts, Recode("exl3", bits=6))}
    edits.register(Half())
    places.add(folder_for(facts, EXL3))
    edits.clear()
    changed = torch.randn(256, 128).bfloat16()
    facts = read_facts(checkpoint({"lm_head.weight": changed}))
    places.add(folder_for(facts, EXL3))
    assert len(places) == 4
    with pytest.raises(GlmExl3Error, match="beside it are exl3-k4-.*made of other weights"):
        with_recoded(facts, EXL3)


def test_groups_can_be_added_to_a_cache(quick, checkpoint) -> None:
    folder = checkpoint()
    few = Recode("exl3", ("head",), 4)
    assert len(make_all(folder, few)) == 1
    assert with_recoded(read_facts(folder), few).recoded.keys() == {"lm_head"}
    with pytest.raises(GlmExl3Error, match="is not in it"):
        with_recoded(read_facts(folder), EXL3)
    make_all(folder)
    assert with_recoded(read_facts(folder), few).recoded.keys() == {"lm_head"}


@dataclass
class Half:
    """Halves the output projection of layer 1 of the target."""

    name: str = "half"
    digest: str = "1"
    roles: frozenset[str] = frozenset({"target"})

    def wants(self, module: str) -> bool:
        return module.endswith(("layers.1.self_attn.o_proj", "layers.2.eh_proj"))

    def edit(
        self, module: str, full_shape: tuple[int, int], shard: torch.Tensor, placement: Placement
    ) -> torch.Tensor:
        assert placement.whole_rows(full_shape)
        assert placement.whole_columns(full_shape)
        return shard / 2


def test_what_is_encoded_has_the_edits(checkpoint) -> None:
    """The edited matrix is what the file decodes to, and the load counts it as edited."""
    folder = checkpoint()
    edits.register(Half())
    few = Recode("exl3", ("mla",), 4)
    module = f"{STEM}.1.self_attn.o_proj"
    work = make.plan(read_facts(folder), few)
    unit = next(unit for unit in work.pending if unit == (module,))
    tensors, changed = make.encode_unit(work, unit, 4, CPU)
    assert changed == {module: ("half",)}
    got = dequantize(
        tensors[f"{module}.trellis"],
        tensors[f"{module}.suh"],
        tensors[f"{module}.svh"],
        Codebook.MUL1,
    ).t()
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        want = file.get_tensor(f"{module}.weight").float() / 2
    assert (got - want).norm() / want.norm() < 0.09


def test_the_manifest_says_which_edits_a_module_has(quick, checkpoint) -> None:
    folder = checkpoint()
    edits.register(Half())
    make_all(folder)
    recoded = with_recoded(read_facts(folder), EXL3).recoded
    assert recoded[f"{STEM}.1.self_attn.o_proj"] == ("half",)
    assert recoded[f"{STEM}.2.eh_proj"] == ()  # MTP: the edit is for the target only
    document = json.loads((folder_for(read_facts(folder), EXL3) / MANIFEST).read_text())
    assert document["edits"] == "half:1"


def test_headers_without_weights_make_a_packed_dummy(checkpoint) -> None:
    folder = checkpoint()
    make_all(folder, headers_only=True)
    seen = with_recoded(read_facts(folder), EXL3)
    assert seen.modules["lm_head"].codebook is Codebook.MUL1


def test_the_command_says_what_is_to_do_and_does_it(
    quick, checkpoint, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "register_edits", lambda: None)
    folder, cache = checkpoint(), tmp_path / "cache"
    monkeypatch.setenv("GLM_EXL3_DENSE_CACHE", str(cache))
    arguments = [str(folder), "--bits", "4", "--groups", "head,dense", "--device", "cpu"]
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert "0 units exist, 3 to make" in capsys.readouterr().out
    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert "3 units exist, 0 to make" in capsys.readouterr().out
    assert cli.main([str(tmp_path / "nothing")]) == cli.FAILED
    assert "neither a folder nor" in capsys.readouterr().err
