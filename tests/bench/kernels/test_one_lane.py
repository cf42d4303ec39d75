"""The library freed by one lane: where it lies, which switch it is built with, its times."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from glm_exl3.ops import ext
from kernels import one_lane


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Path, str]]:
    """Targets and nvcc's flags of every build, which writes an empty file."""
    found: list[tuple[Path, str]] = []

    def build(target: Path, architectures: tuple[str, ...], jobs: int) -> Path:
        found.append((target, os.environ["NVCC_APPEND_FLAGS"]))
        target.parent.mkdir(parents=True)
        target.touch()
        return target

    monkeypatch.setattr(ext, "build", build)
    monkeypatch.setattr(ext, "SHIPPED", tmp_path / "none")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "")
    return found


def test_it_is_found_by_the_cache_folder_and_built_once(
    built: list[tuple[Path, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = one_lane.build(tmp_path, 1)
    assert one_lane.build(tmp_path, 1) == target
    assert built == [(target, "-DGLM_EXL3_ONE_LANE_FREES")]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ext.find_library() == target


def test_a_shipped_library_would_hide_it(
    built: list[tuple[Path, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ext, "SHIPPED", Path(__file__))
    with pytest.raises(SystemExit, match="move it away"):
        one_lane.build(tmp_path, 1)
    assert built == []


def test_the_sources_know_the_switch_and_leave_it_off() -> None:
    text = "".join(path.read_text() for path in sorted(ext.SOURCES.glob("*.cuh")))
    assert f"#ifdef {one_lane.SWITCH}" in text
    assert f"#define {one_lane.SWITCH}" not in text


def test_the_lower_time_of_each_library_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter([10.0, 30.0, 12.0, 22.0])  # one, every, one, every

    def child(folder: Path | None) -> list[dict[str, Any]]:
        row = {"op": "moe", "shape": "s", "m": 256, "k_bits": 4, "codebook": "mcg"}
        return [row | {"ours_us": next(given)}]

    monkeypatch.setattr(one_lane, "child", child)
    [row] = one_lane.compare(tmp_path)
    assert (row["one_us"], row["every_us"], row["ratio"]) == (10.0, 22.0, 2.2)
