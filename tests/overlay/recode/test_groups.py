"""Names, groups, sizes: the arithmetic of the dense recode."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3 import envs
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.recode import (
    GROUPS,
    Recode,
    dense_modules,
    flat_name,
    group_of,
    parse_groups,
    stored_bytes,
)
from glm_exl3.format.recode_cache import units
from glm_exl3.quant.facts import dense_modules_of, read_facts

STEM = "model.language_model.layers"


def test_every_matrix_has_its_group(matrices) -> None:
    tensors = [(f"{name}.weight", shape) for name, shape in matrices.items()]
    tensors += [(f"{STEM}.0.self_attn.A_log", (2,)), (f"{STEM}.1.mlp.gate.weight", (8, 128))]
    tensors += [(f"{STEM}.1.self_attn.kv_b_proj.weight", (128, 128))]
    found = {name: group for name, (group, _) in dense_modules(tensors, GROUPS).items()}
    assert found.keys() == matrices.keys()
    assert found[f"{STEM}.0.self_attn.o_proj"] == "kda"
    assert found[f"{STEM}.1.self_attn.o_proj"] == "mla"
    assert found[f"{STEM}.2.eh_proj"] == "mla"
    assert set(found.values()) == set(GROUPS)
    assert dense_modules(tensors, ["head"]) == {"lm_head": ("head", (256, 128))}


@pytest.mark.parametrize(
    "module",
    [
        "layers.0.self_attn.o_proj",
        f"{STEM}.3.mlp.experts.5.down_proj",
        f"{STEM}.3.mlp.gate",
        f"{STEM}.3.self_attn.f_b_proj",
        f"{STEM}.3.self_attn.indexer.wk",
        "model.visual.blocks.0.mlp.gate_proj",
    ],
)
def test_what_must_stay_has_no_group(module: str) -> None:
    assert group_of(module, lambda name: True) is None


def test_names_of_all_models_meet() -> None:
    want = "model.layers.4.self_attn.o_proj"
    for name in (f"{STEM}.4.self_attn.o_proj", f"language_model.{want}", want):
        assert flat_name(name) == want
    assert flat_name("language_model.lm_head") == "lm_head"


def test_a_group_without_a_dense_matrix_is_an_error(checkpoint, matrices) -> None:
    facts = read_facts(checkpoint())
    everything = Recode("fp8")
    assert len(dense_modules_of(facts, everything)) == len(matrices)
    index = replace(
        facts.index,
        tensors={name: e for name, e in facts.index.tensors.items() if name != "lm_head.weight"},
    )
    with pytest.raises(GlmExl3Error, match="DENSE_GROUPS has head, of which"):
        dense_modules_of(replace(facts, index=index), everything)
    drafter = replace(
        facts.index,
        tensors={"layers.0.self_attn.o_proj.weight": facts.index.tensors["lm_head.weight"]},
    )
    assert dense_modules_of(replace(facts, index=drafter), everything) == {}


@given(st.lists(st.sampled_from(GROUPS), min_size=1))
def test_groups_have_one_order(names: list[str]) -> None:
    groups = parse_groups(",".join(names))
    assert set(groups) == set(names)
    assert groups == tuple(sorted(groups, key=GROUPS.index))
    assert parse_groups(" , ".join(groups)) == groups


def test_settings_say_what_is_recoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(envs.dense_recode()) == "off"
    monkeypatch.setenv("GLM_EXL3_DENSE_RECODE", "exl3")
    monkeypatch.setenv("GLM_EXL3_DENSE_GROUPS", "kda,shared")
    monkeypatch.setenv("GLM_EXL3_DENSE_BITS", "5")
    assert str(envs.dense_recode()) == "exl3:5[shared,kda]"
    for name, value in (("GROUPS", "kda,vision"), ("GROUPS", ","), ("BITS", "9"), ("BITS", "x")):
        monkeypatch.setenv(f"GLM_EXL3_DENSE_{name}", value)
        with pytest.raises(GlmExl3Error):
            envs.dense_recode()
        monkeypatch.delenv(f"GLM_EXL3_DENSE_{name}")


def test_bytes_of_the_schemes() -> None:
    assert stored_bytes(4096, 8192, "off", 6) == 2 * 4096 * 8192
    assert stored_bytes(4096, 8192, "fp8", 6) == 4096 * 8192 + 4 * 4096
    assert stored_bytes(4096, 8192, "exl3", 6) == 4096 * 8192 * 6 // 8 + 2 * (4096 + 8192)


def test_freed_memory_counts_what_a_rank_holds(checkpoint, monkeypatch) -> None:
    from glm_exl3.patches.dense_headroom import less_freed
    from glm_exl3.quant.config import Exl3Config

    def freed(ranks: int, hidden_layers: int | None = None) -> int:
        config = Exl3Config({})
        config.maybe_update_config(str(checkpoint()))
        return config.freed_bytes(ranks, hidden_layers)

    assert freed(1) == 0
    monkeypatch.setenv("GLM_EXL3_DENSE_RECODE", "fp8")
    monkeypatch.setenv("GLM_EXL3_DENSE_GROUPS", "head,mla")
    head, o_proj, eh_proj = 256 * 124, 128 * 124, 128 * 252
    replicated = 128 * 124 + 64 * 124
    assert freed(1) == head + o_proj + replicated + eh_proj
    assert freed(2, 2) == head // 2 + o_proj // 2 + replicated
    assert less_freed(100, 30) == 70
    assert less_freed(10, 30) == 0


@pytest.mark.parametrize("asked", [{}, {"GLM_EXL3_DENSE_FREED": "host"}])
def test_the_workers_measurement_stays_unless_a_recode_wants_head_room(
    asked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from glm_exl3.patches import dense_headroom

    before = Worker.determine_available_memory
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    dense_headroom.apply()
    assert Worker.determine_available_memory is before


def test_head_room_takes_the_freed_bytes_from_the_cache(
    checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from glm_exl3.patches import dense_headroom
    from glm_exl3.quant.config import Exl3Config

    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 1 << 20)
    monkeypatch.setenv("GLM_EXL3_DENSE_RECODE", "fp8")
    monkeypatch.setenv("GLM_EXL3_DENSE_GROUPS", "head")
    monkeypatch.setenv("GLM_EXL3_DENSE_FREED", "host")
    dense_headroom.apply()
    config = Exl3Config({})
    config.maybe_update_config(str(checkpoint()))
    text = SimpleNamespace(num_hidden_layers=2)
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(
            quant_config=config,
            speculative_config=None,
            model_config=SimpleNamespace(hf_text_config=text),
            parallel_config=SimpleNamespace(tensor_parallel_size=2),
        )
    )
    assert Worker.determine_available_memory(worker) == (1 << 20) - 256 * 124 // 2


def test_modules_with_one_input_are_encoded_together(matrices) -> None:
    found = units(matrices)
    assert (*(f"{STEM}.0.self_attn.{n}_proj" for n in "qkv"),) in found
    assert (f"{STEM}.0.mlp.gate_proj", f"{STEM}.0.mlp.up_proj") in found
    assert ("lm_head",) in found
    assert sorted(name for unit in found for name in unit) == sorted(matrices)
    assert units(["a.up_proj", "a.k_proj"]) == [("a.k_proj",), ("a.up_proj",)]
