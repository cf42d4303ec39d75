"""The demo with a fake engine and a checkpoint that is there already."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from glm_launch import demo
from glm_launch.errors import LaunchFailedError
from glm_launch.ui import Ui

RUN = """
import sys
from pathlib import Path
from glm_launch import cli, demo
cli.perform(demo.run, once=sys.argv[2] == "once", constructed=Path(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Path) -> Path:
    """What a first demo leaves: model, drafter and the stamp of the sources."""
    made = tmp_path / "demo"
    made.mkdir()
    for name in ("model", "drafter"):
        shutil.copytree(checkpoint, made / name)
    (made / "stamp").write_text(demo.sources_digest())
    return made


@pytest.fixture
def demo_env(launcher):
    for key in ("MODEL", "SPEC_METHOD"):
        launcher.env.pop(key)
    return launcher


def test_edits_of_the_large_model_are_not_for_the_demo(demo_env, folder: Path) -> None:
    """They name its layers, its donor and its streams."""
    demo_env.env |= {"ABLIT": "1", "STEER_VECTOR": "/none.gguf", "STEER_SHA256": "0" * 64}
    process = demo_env.popen("-c", RUN, str(folder), "once")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "changed in memory" not in output


def is_free(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) != 0


def test_once_answers_and_leaves_nothing(demo_env, folder: Path) -> None:
    process = demo_env.popen("-c", RUN, str(folder), "once")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    for part in ("READY", "word1 word2", "tok/s", "endpoint  http", "curl http", "no process"):
        assert part in output
    assert output.index("READY") < output.index("word1")
    assert demo_env.left_over() == []
    assert is_free(demo_env.env["PORT"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_a_signal(demo_env, folder: Path, wait_for, number: signal.Signals) -> None:
    process = demo_env.popen("-c", RUN, str(folder), "serve")
    lines = iter(process.stdout.readline, "")
    assert any("serving until Ctrl-C" in line for line in lines)
    assert demo_env("status").returncode == 0
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert demo_env.left_over() == []


def test_a_killed_demo_takes_its_ranks_along(demo_env, folder: Path, wait_for) -> None:
    process = demo_env.popen("-c", RUN, str(folder), "serve")
    assert any("serving until Ctrl-C" in line for line in iter(process.stdout.readline, ""))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: demo_env.left_over() == [])
    done = demo_env("stop")
    assert done.returncode == 0


def test_stop_from_elsewhere_ends_the_demo(demo_env, folder: Path) -> None:
    process = demo_env.popen("-c", RUN, str(folder), "serve")
    assert any("serving until Ctrl-C" in line for line in iter(process.stdout.readline, ""))
    assert demo_env("stop").returncode == 0
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "stopped by another command" in output


def test_a_rank_that_dies_ends_the_demo_as_unhealthy(demo_env, folder: Path) -> None:
    process = demo_env.popen("-c", RUN, str(folder), "serve")
    assert any("serving until Ctrl-C" in line for line in iter(process.stdout.readline, ""))
    worker = json.loads(demo_env("status", "--json").stdout)["ranks"][1]["pid"]
    os.kill(worker, signal.SIGKILL)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 5 and "rank 1 (worker)" in output
    assert demo_env.left_over() == []


@pytest.mark.parametrize("method", ["dflash", "mtp"])
def test_drafting_is_passed_on(demo_env, folder: Path, method: str) -> None:
    process = demo_env.popen("-c", RUN, str(folder), "once", SPEC_METHOD=method)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert f"drafting {method}" in output
    plan = json.loads(next(demo_env.state.glob("launches/*/plan.json")).read_text())
    config = plan["ranks"][1]["argv"]
    spec = json.loads(config[config.index("--speculative-config") + 1])
    assert spec["method"] == method
    assert spec.get("model") == (str(folder / "drafter") if method == "dflash" else None)


def test_the_miniature_is_served_where_it_lies_in_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "MINIATURE", tmp_path)
    assert demo.weights().build_in == demo.CONSTRUCTED
    (tmp_path / "full-4bpw").mkdir()
    (tmp_path / "full-4bpw" / "model.safetensors").touch()
    served = demo.weights()
    assert (served.model, served.build_in) == (tmp_path / "full-4bpw", None)
    assert demo.weights(tmp_path / "x").model == tmp_path / "x" / "model"


def test_the_checkpoint_is_built_once_and_again_when_its_sources_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []

    def build(draft: Path) -> None:
        (draft / "model").mkdir()
        built.append(draft)

    monkeypatch.setattr(demo, "build_checkpoint", build)
    ui = Ui(io.StringIO(), io.StringIO())
    folder = tmp_path / "models" / "demo"
    demo.ensure_checkpoint(ui, folder)
    demo.ensure_checkpoint(ui, folder)
    assert len(built) == 1 and (folder / "model").is_dir()
    monkeypatch.setattr(demo, "sources_digest", lambda: "changed")
    demo.ensure_checkpoint(ui, folder)
    assert len(built) == 2


def test_an_interrupted_build_is_not_taken_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(draft: Path) -> None:
        (draft / "model").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "build_checkpoint", interrupted)
    folder = tmp_path / "demo"
    with pytest.raises(KeyboardInterrupt):
        demo.ensure_checkpoint(Ui(io.StringIO(), io.StringIO()), folder)
    assert not folder.exists()


def test_a_failing_builder_is_told_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "builder"
    script.write_text("#!/bin/sh\necho 'ValueError: no room for the tensors'\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(script))
    with pytest.raises(LaunchFailedError, match="no room for the tensors"):
        demo.build_checkpoint(tmp_path)
