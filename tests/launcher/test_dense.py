"""DENSE_RECODE: variables for ranks, a line for people, pairs that are refused, the verb."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from glm_launch import dense, edits, recode
from glm_launch.errors import ConfigurationError, RefusedError
from glm_launch.settings import Settings
from glm_launch.settings_load import load
from glm_launch.ui import Ui

NANO = Path(__file__).parents[2] / "bench" / "nano" / "model" / "tr3"


def settings(**env: str) -> Settings:
    return load({"SPEC_METHOD": "none", **env}, Path("/nonexistent")).settings


def made_cache(root: Path, bits: int = 6) -> Path:
    folder = root / "recoded" / f"exl3-k{bits}-0123"
    folder.mkdir(parents=True)
    (folder / "recode.json").write_text("{}")
    return root


def test_off_adds_nothing() -> None:
    assert edits.settle(settings(MODEL=str(NANO))) == edits.Settled({})


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_ranks_get_scheme_and_groups_and_people_a_line(scheme: str) -> None:
    settled = edits.settle(settings(DENSE_RECODE=scheme, DENSE_GROUPS="mla, shared"))
    assert settled.env == {
        "GLM_EXL3_DENSE_RECODE": scheme,
        "GLM_EXL3_DENSE_GROUPS": "shared,mla",
        "GLM_EXL3_DENSE_BITS": "6",
        "GLM_EXL3_DENSE_FREED": "kv",
    }
    assert settled.title == (
        f"dense recode {scheme}[shared,mla]: numbers differ from the checkpoint's"
    )
    assert not settled.folders


def test_exl3_needs_what_the_command_makes(tmp_path: Path) -> None:
    chosen = settings(DENSE_RECODE="exl3", DENSE_CACHE=str(tmp_path), DENSE_FREED="host")
    with pytest.raises(RefusedError) as error:
        edits.settle(chosen)
    assert error.value.findings[0].fix == "./start.sh recode"
    made_cache(tmp_path, bits=4)
    with pytest.raises(RefusedError, match="at 6 bits"):
        edits.settle(chosen)
    made_cache(tmp_path)
    settled = edits.settle(chosen)
    assert settled.folders == ((tmp_path, "/edits/dense"),)
    assert "stays free" in settled.title
    here = edits.variables(settled, contained=False)
    assert here["GLM_EXL3_DENSE_CACHE"] == str(tmp_path)
    inside = edits.variables(settled, contained=True)
    assert inside["GLM_EXL3_DENSE_CACHE"] == "/edits/dense"


def test_the_cache_lies_beside_a_folder_and_below_the_state_of_a_hub_model(tmp_path: Path) -> None:
    local = settings(MODEL=str(tmp_path), RUNTIME="local")
    assert dense.cache_root(local) == tmp_path
    hub = settings(MODEL="who/model", IMAGE="x:1", GLM_STATE_DIR=str(tmp_path / "state"))
    assert dense.cache_root(hub) == tmp_path / "state" / "dense"


@pytest.mark.parametrize(
    "env",
    [
        {"DENSE_FREED": "host"},
        {"DENSE_FREED": "host", "DENSE_RECODE": "fp8", "KV_CACHE_MEMORY_BYTES": "4096"},
        {"DENSE_GROUPS": "vision"},
        {"DENSE_GROUPS": ","},
        {"DENSE_BITS": "9"},
        {"DENSE_RECODE": "int4"},
    ],
)
def test_pairs_and_values_that_make_no_sense_exit_2(env: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        settings(**env)
    assert error.value.exit_code == 2


def test_the_command_runs_inside_the_image_with_the_weights_read_only(tmp_path: Path) -> None:
    chosen = settings(DENSE_RECODE="exl3", MODEL=str(NANO), IMAGE="x:1")
    env = dense.environment(chosen)
    command = recode.container_command(
        chosen, (tmp_path / "a" / "b", tmp_path), tmp_path / "c", env, [("/donor", "/d")], []
    )
    assert f"--mount=type=bind,source={tmp_path},target=/models/source,readonly" in command
    assert "--mount=type=bind,source=/donor,target=/d,readonly" in command
    assert f"--mount=type=bind,source={tmp_path / 'c'},target=/edits/dense" in command
    assert command[command.index("--network") + 1] == "none"
    assert "GLM_EXL3_DENSE_BITS=6" in command
    assert command[command.index("x:1") + 1 :] == [
        "-m", "glm_exl3.recode", "/models/source/a/b", "--cache", "/edits/dense",
    ]  # fmt: skip


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    calls: list[tuple[list[str], dict[str, str]]] = []

    def call(command: list[str], env: Any = None) -> int:
        calls.append((command, env))
        return 7

    monkeypatch.setattr(subprocess, "call", call)
    return calls


def test_the_verb_hands_over_model_cache_and_settings(
    called: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in {
        "MODEL": str(NANO), "DENSE_RECODE": "exl3", "DENSE_BITS": "5", "SPEC_METHOD": "none",
        "DENSE_CACHE": str(tmp_path), "RUNTIME": "local", "GLM_STATE_DIR": str(tmp_path / "state"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert recode.run(Ui(), verify=True) == 7
    ((command, env),) = called
    assert command[1:] == ["-m", "glm_exl3.recode", str(NANO), "--cache", str(tmp_path), "--verify"]
    assert env["GLM_EXL3_DENSE_BITS"] == "5"
    monkeypatch.setenv("DENSE_RECODE", "fp8")
    with pytest.raises(ConfigurationError, match="fp8"):
        recode.run(Ui())
