"""Registration: once, without a device, and a failure that cannot be overlooked."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import pytest

from glm_exl3 import envs, plugin
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.quant import startup


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_done", set())
    monkeypatch.setattr(startup, "_state", startup._State())


def steps(monkeypatch: pytest.MonkeyPatch, *pairs) -> None:
    monkeypatch.setattr(plugin, "STEPS", pairs)


def test_every_step_runs_once(fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    steps(monkeypatch, *((name, lambda n=name: calls.append(n)) for name in ("a", "b")))
    plugin.register()
    plugin.register()
    assert calls == ["a", "b"]


def test_a_failure_is_raised_at_every_use(fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("the cause")

    ran: list[str] = []
    steps(
        monkeypatch, ("quantization", lambda: None), ("b", broken), ("c", lambda: ran.append("c"))
    )
    plugin.register()
    assert not ran
    from glm_exl3.quant.config import Exl3Config

    with pytest.raises(GlmExl3Error, match="the cause") as error:
        Exl3Config({})
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(GlmExl3Error, match="the cause"):
        startup.prepare_model()


def test_without_a_configuration_to_raise_it_the_failure_is_raised_at_once(
    fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise OSError("no vllm")

    steps(monkeypatch, ("quantization", broken))
    with pytest.raises(OSError, match="no vllm"):
        plugin.register()


def test_importing_the_plugin_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, glm_exl3.plugin;"
        "assert not {'torch', 'vllm'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_vllm_finds_configuration_models_and_no_device() -> None:
    code = """
from glm_exl3 import plugin
plugin.register(); plugin.register()
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.models.registry import ModelRegistry
assert get_quantization_config("exl3").__module__ == "glm_exl3.quant.config"
for architecture in plugin.ARCHITECTURES:
    assert ModelRegistry.models[architecture].module_name.startswith("glm_exl3."), architecture
import torch
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_digest_names_what_ranks_must_share(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = plugin.make_digest()
    assert [name for name, _ in digest.entries] == [
        *("plugin", "sources", "vllm", "patches", "kernels", "backend", "fused"),
        *("attention", "edits", "dense", "steer", "preset", "settings"),
    ]
    assert digest == plugin.make_digest()
    monkeypatch.setenv("GLM_EXL3_DIGEST_SALT", "x")
    assert plugin.make_digest().differences(digest) == ("salt: x / absent",)


TEXTS = ("1", "0", "2", "7", "1:2,3:4", "1-3", "shared", "mhc")


def test_a_rank_with_another_path_of_recoded_products_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = plugin.make_digest()
    monkeypatch.setenv("GLM_EXL3_RECODE_PATH", "rows")
    assert plugin.make_digest().differences(usual) == ("settings: RECODE_PATH=rows / -",)


@pytest.mark.parametrize("knob", envs.KNOBS, ids=lambda knob: knob.name)
def test_settings_of_all_ranks_are_compared_and_no_others(knob: envs.Knob) -> None:
    seen = envs.shared_settings(plugin.NAMED, {knob.name: _other(knob)}) != "-"
    assert seen == (knob.scope == "all ranks" and knob not in plugin.NAMED)


def _other(knob: envs.Knob) -> str:
    """A valid text that does not mean the default."""
    for text in (*knob.choices, *TEXTS):
        with suppress(GlmExl3Error):
            if knob.read({knob.name: text}) != knob.default:
                return text
    raise AssertionError(f"no text for {knob.name}")
