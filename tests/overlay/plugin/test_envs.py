"""The knob table: types, defaults, errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_exl3 import envs
from glm_exl3.format.errors import GlmExl3Error


def test_defaults_without_any_variable() -> None:
    values = envs.check_all({})
    assert values["GLM_EXL3_BACKEND"] == "auto"
    assert values["GLM_EXL3_JOIN_TIMEOUT_S"] == 300.0
    assert values["GLM_EXL3_IGNORE_TENSORS"] == ()


def test_values_are_typed() -> None:
    environ = {"GLM_EXL3_JOIN_TIMEOUT_S": " 12.5 ", "GLM_EXL3_IGNORE_TENSORS": "^a, b$ ,"}
    values = envs.check_all(environ)
    assert values["GLM_EXL3_JOIN_TIMEOUT_S"] == 12.5
    assert values["GLM_EXL3_IGNORE_TENSORS"] == ("^a", "b$")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GLM_EXL3_JOIN_TIMEOUT_S", "soon"),
        ("GLM_EXL3_JOIN_TIMEOUT_S", "0"),
        ("GLM_EXL3_PLATFORM", "gpu"),
        ("GLM_EXL3_IGNORE_TENSORS", "("),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_variable(name: str, text: str) -> None:
    with pytest.raises(GlmExl3Error, match=name):
        envs.check_all({name: text})


def test_names_are_ours_and_distinct() -> None:
    names = [knob.name for knob in envs.KNOBS]
    assert len(set(names)) == len(names)
    assert all(name.startswith("GLM_EXL3_") for name in names)


def test_the_page_is_generated_from_the_table() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "environment.md"
    assert page.read_text() == envs.as_markdown()
    assert all(f"`{knob.name}`" in envs.as_markdown() for knob in envs.KNOBS)
