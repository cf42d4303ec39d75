"""`drafter pack` hands the right folders to the converter, in a process or in a container."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from glm_launch import drafter
from glm_launch.errors import ConfigurationError, RefusedError
from glm_launch.settings import Settings
from glm_launch.settings_load import load
from glm_launch.ui import Ui

NANO = Path(__file__).parents[2] / "bench" / "nano" / "model" / "drafter"


def settings(**env: str) -> Settings:
    return load(env, Path("/nonexistent")).settings


def test_a_folder_is_packed_beside_itself(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(NANO, folder)
    chosen = settings(DFLASH_MODEL=str(folder))
    assert drafter.located(chosen) == (folder, folder)
    assert drafter.beside(chosen, folder, 6) == tmp_path / "drafter-exl3-6bpw"


def test_a_hub_drafter_is_found_in_the_cache_with_its_root(tmp_path: Path) -> None:
    chosen = settings(DFLASH_MODEL="who/drafter", HF_HOME=str(tmp_path), IMAGE="x:1",
                      GLM_STATE_DIR=str(tmp_path / "state"))  # fmt: skip
    with pytest.raises(RefusedError, match="download"):
        drafter.located(chosen)
    root = tmp_path / "hub" / "models--who--drafter"
    snapshot = root / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert drafter.located(chosen) == (snapshot, root)
    out = drafter.beside(chosen, snapshot, 5)
    assert out == tmp_path / "state" / "drafters" / "who--drafter-exl3-5bpw"
    command = drafter.container_command(chosen, snapshot, root, out, ["--bits", "5"])
    assert f"type=bind,source={root},target=/models/source,readonly" in command
    assert f"type=bind,source={out.parent},target=/models/out" in command
    assert command[command.index("--network") + 1] == "none"
    at = command.index("x:1")
    assert command[at + 1 :] == [
        "-m", "glm_exl3.drafter", "/models/source/snapshots/main",
        "/models/out/who--drafter-exl3-5bpw", "--bits", "5",
    ]  # fmt: skip
    assert "--privileged" not in command


@pytest.mark.parametrize("env", [{"SPEC_METHOD": "none"}, {"SPEC_METHOD": "mtp"}, {}])
def test_without_a_drafter_there_is_nothing_to_pack(env: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        drafter.located(settings(**env))


def test_a_container_that_cannot_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(NANO, folder)
    for name, value in {"DFLASH_MODEL": str(folder), "IMAGE": "x:1", "PATH": str(tmp_path),
                        "GLM_STATE_DIR": str(tmp_path / "state")}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLM_ENV_FILE", str(tmp_path / "env"))
    with pytest.raises(RefusedError, match="could not start x:1"):
        drafter.pack(Ui(), bits=6)


@pytest.mark.slow
def test_the_verb_runs_the_converter_and_returns_its_code(launcher: Any, tmp_path: Path) -> None:
    env = {"SPEC_METHOD": "dflash", "DFLASH_MODEL": str(NANO), "ENGINE_COMMAND": ""}
    taken = tmp_path / "taken"
    taken.mkdir()
    done = launcher("drafter", "pack", "--out", str(taken), **env)
    assert done.returncode == 2
    assert f"{taken} exists" in done.stderr
    assert launcher("drafter", "pack", "--bits", "9", **env).returncode == 2
