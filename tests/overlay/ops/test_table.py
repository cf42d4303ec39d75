"""Choosing a back end: auto falls through with one line, a name never does."""

from __future__ import annotations

import logging

import pytest

from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.ops import table
from glm_exl3.ops.table import BackendRow, Device

GPU = Device("cuda", (9, 0))
CPU = Device("cpu")


def rows(**refusals: str | None) -> tuple[BackendRow, ...]:
    return tuple(
        BackendRow(name, f"nowhere.{name}", ("cuda",), lambda device, why=why: why)
        for name, why in refusals.items()
    )


@pytest.fixture(autouse=True)
def fresh_choice() -> None:
    table._choose.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    return lambda *new: monkeypatch.setattr(table, "ROWS", new)


def test_auto_takes_the_first_that_can_run_and_says_what_it_passed_over(install, caplog) -> None:
    install(*rows(fast="not built", slow=None))
    with caplog.at_level(logging.INFO, "vllm.glm_exl3"):
        assert table.choose(GPU, "auto").name == "slow"
        table.choose(GPU, "auto")
    assert len(caplog.records) == 1
    assert "fast: not built" in caplog.text


def test_a_named_back_end_that_cannot_run_is_an_error(install) -> None:
    install(*rows(fast="not built", slow=None))
    with pytest.raises(GlmExl3Error, match="'fast' not built"):
        table.choose(GPU, "fast")


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(GlmExl3Error, match="'magic'.*cuda, reference"):
        table.choose(CPU, "magic")


def test_no_back_end_at_all_is_an_error(install) -> None:
    install(*rows(fast="not built"))
    with pytest.raises(GlmExl3Error, match="fast: not built"):
        table.choose(GPU, "auto")


def test_the_knob_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_EXL3_BACKEND", "cuda")
    with pytest.raises(GlmExl3Error, match="runs on cuda, not on cpu"):
        table.choose(CPU)


@pytest.mark.parametrize("capability", [(7, 5), (10, 1)])
def test_capability_bounds_are_inclusive(capability: tuple[int, int]) -> None:
    row = BackendRow("x", "m", ("cuda",), lambda d: None, (8, 0), (10, 0))
    assert row.refusal(Device("cuda", (8, 0))) is None
    assert row.refusal(Device("cuda", (10, 0))) is None
    assert "compute capability" in (row.refusal(Device("cuda", capability)) or "")


def test_cpu_gets_the_reference_and_decodes_on_load() -> None:
    row = table.choose(CPU, "auto")
    assert row.name == "reference"
    assert "cpu" in row.dense_on_load
    for name in ("linear", "moe", "dequant"):
        assert callable(getattr(row.load(), name))
