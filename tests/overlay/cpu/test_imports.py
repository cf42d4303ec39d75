"""Callbacks around imports run once, in order, and fail loudly."""

from __future__ import annotations

import importlib
import sys

import pytest

from glm_exl3.cpu import imports


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = f"sample_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_a_callback_sees_the_loaded_module(module):
    imports.after_import(module, lambda loaded: setattr(loaded, "value", loaded.value + 1))
    assert importlib.import_module(module).value == 2
    sys.modules.pop(module)
    assert importlib.import_module(module).value == 1


def test_a_loaded_module_is_seen_at_once(module):
    importlib.import_module(module)
    seen = []
    imports.after_import(module, seen.append)
    assert [loaded.__name__ for loaded in seen] == [module]
    assert not imports.before_import(module, lambda: None)


def test_a_callback_runs_before_the_module(module):
    seen = []
    assert imports.before_import(module, lambda: seen.append(module in sys.modules))
    importlib.import_module(module)
    assert seen == [False]


def test_an_error_in_a_callback_fails_the_import(module):
    def fail(_):
        raise RuntimeError("no")

    imports.after_import(module, fail)
    with pytest.raises(RuntimeError, match="no"):
        importlib.import_module(module)


def test_a_missing_module_stays_missing():
    imports.after_import("no_such_module_anywhere", lambda _: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_anywhere")
