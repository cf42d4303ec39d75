"""Replacing names: everywhere, once, and never silently."""

from __future__ import annotations

import sys
import types

import pytest

from glm_exl3.cpu import engine, replacements
from glm_exl3.cpu.replacements import EngineDriftError, Kernel, Replacement


class Thing:
    def method(self) -> str:
        return "old"

    @staticmethod
    def static() -> str:
        return "old"


class Heir(Thing):
    pass


def new_function() -> str:
    return "new"


def new_method(self: object) -> str:
    return "new"


def wrap(original):
    return lambda: original() + "+"


BY = f"{__name__}:"


@pytest.fixture
def module():
    sys.modules.setdefault(__name__, sys.modules[__name__])
    loaded = types.ModuleType("vllm.sample")
    loaded.function = lambda: "old"
    loaded.Thing = type("Thing", (Thing,), {"static": staticmethod(Thing.static)})
    loaded.Heir = type("Heir", (loaded.Thing,), {})
    return loaded


def replacement(attribute: str, by: str, **others) -> Replacement:
    sys.modules["replacement_samples"] = sys.modules[__name__]
    return Replacement(
        "vllm.sample", attribute, f"replacement_samples:{by}", "it breaks.", **others
    )


def test_a_function_is_replaced_where_it_was_copied(module):
    copy = types.ModuleType("vllm.copy")
    copy.alias, copy.other = module.function, len
    replacements.apply(replacement("function", "new_function"), module, [copy])
    assert module.function() == copy.alias() == "new"
    assert copy.other is len


def test_methods_keep_their_kind(module):
    replacements.apply(replacement("Thing.method", "new_method"), module)
    replacements.apply(replacement("Heir.static", "new_function"), module)
    assert module.Thing().method() == "new"
    assert module.Heir.static() == module.Heir().static() == "new"
    assert module.Thing.static() == "old"


def test_a_wrapper_gets_the_original(module):
    entry = replacement("function", "wrap", wraps=True)
    replacements.apply(entry, module)
    replacements.apply(entry, module)
    assert module.function() == "old+"


@pytest.mark.parametrize("attribute", ["gone", "Thing.gone", "Gone.method"])
def test_a_vanished_name_is_named(attribute, module):
    with pytest.raises(EngineDriftError) as caught:
        replacements.apply(replacement(attribute, "new_function"), module)
    message = str(caught.value)
    assert f"vllm.sample.{attribute}" in message
    assert replacements.vllm_version() in message
    assert "it breaks" in message


def test_a_vanished_name_fails_the_import_of_its_module(tmp_path, monkeypatch):
    (tmp_path / "drifted_sample.py").write_text("kept = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    replacements.install([Replacement("drifted_sample", "gone", "builtins:len", "it breaks.")])
    with pytest.raises(EngineDriftError, match=r"drifted_sample\.gone"):
        __import__("drifted_sample")


def test_a_kernel_ignores_grid_and_launch_options():
    seen = []
    kernel = Kernel(lambda *args, **kwargs: seen.append((args, kwargs)))
    kernel[(4,)](1, 2, BLOCK=8, num_warps=4)
    assert seen == [((1, 2), {"BLOCK": 8})]


def test_nothing_is_installed_on_another_platform(monkeypatch):
    def forbidden(_):
        raise AssertionError("installed")

    monkeypatch.setattr(replacements, "install", forbidden)
    for platform in (None, object()):
        fake = types.ModuleType("vllm.platforms")
        fake._current_platform = platform
        monkeypatch.setitem(sys.modules, "vllm.platforms", fake)
        assert engine.install() is False
