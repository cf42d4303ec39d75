"""The quantisation configuration: names, sources, processes, failures."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from glm_exl3.format.errors import FormatError, GlmExl3Error
from glm_exl3.quant.names import Source, parts_of


class Mapper:
    """A prefix mapper like vLLM's, which matches `lm_head.` with its dot."""

    def map_name(self, key: str) -> str | None:
        for old, new in (("model.language_model.", "language_model.model."), ("lm_head.", "l.h.")):
            if key.startswith(old):
                return new + key.removeprefix(old)
        return None


STEM = "model.language_model.layers.0.self_attn"


@pytest.fixture
def config(packed, exl3_config):
    tensors = packed(128, 384).named(f"{STEM}.qkv_proj")
    tensors |= packed(128, 128).named("lm_head")
    for expert in range(3):
        for part in ("gate_proj", "up_proj", "down_proj"):
            tensors |= packed(128, 128).named(
                f"model.language_model.layers.1.mlp.experts.{expert}.{part}"
            )
    made = exl3_config(tensors)
    made.apply_vllm_mapper(Mapper())
    made.apply_vllm_mapper(Mapper())
    return made


def test_a_fused_module_stands_for_its_parts(config) -> None:
    sources = config.packed_sources(
        "language_model.model.layers.0.self_attn.in_proj_qkvbfg_a", merged=True
    )
    assert sources is not None
    assert sources[:3] == tuple(Source(f"{STEM}.qkv_proj", part, 3) for part in range(3))
    assert [s.module for s in sources[3:]] == [f"{STEM}.{n}_proj" for n in ("b", "f_a", "g_a")]


def test_a_layer_without_packed_parts_has_no_sources(config) -> None:
    assert (
        config.packed_sources("language_model.model.layers.0.mlp.gate_up_proj", merged=True) is None
    )
    assert config.expert_names("language_model.model.layers.0.mlp.experts") is None


def test_experts_are_found_under_vllms_prefix(config) -> None:
    names = config.expert_names("language_model.model.layers.1.mlp.experts")
    assert names == [f"model.language_model.layers.1.mlp.experts.{e}" for e in range(3)]


def test_the_head_is_found_although_its_mapper_wants_a_dot(config) -> None:
    assert config.source_of("l.h") == Source("lm_head")


def test_another_process_reads_the_headers_itself(config) -> None:
    blob = pickle.dumps(config)
    assert b"trellis" not in blob
    copy = pickle.loads(blob)
    assert copy.facts.folder == config.facts.folder
    assert copy.source_of("lm_head") == Source("lm_head")


def test_a_model_that_is_not_there_is_an_error_without_a_download() -> None:
    from glm_exl3.quant.facts import find_folder

    with pytest.raises(GlmExl3Error, match="neither a folder nor in the local"):
        find_folder("nobody/never-existed", None)


def test_damage_shows_when_the_configuration_reads_the_headers(
    packed, folder, tmp_path: Path
) -> None:
    from glm_exl3.quant.config import Exl3Config

    where = folder(packed(128, 128).named("a.o_proj"))
    shard = next(where.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FormatError, match=shard.name):
        Exl3Config({}).maybe_update_config(str(where))


def test_what_vllm_asks_of_a_configuration(config) -> None:
    assert config.get_name() == "exl3"
    assert torch.bfloat16 in config.get_supported_act_dtypes()
    assert config.get_min_capability() == 80
    assert "folder" in repr(config)


def test_unmerged_layers_are_their_own_part() -> None:
    assert parts_of("a.qkv_proj", merged=False) == ("a.qkv_proj",)
    assert parts_of("a.qkv_proj", merged=True) == ("a.q_proj", "a.k_proj", "a.v_proj")
