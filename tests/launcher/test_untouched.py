"""A setting out of range ends every verb with 2 before ssh or docker is called once.

The values are made from the fields themselves, so a new setting is covered without a line here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from annotated_types import Ge, Le
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from glm_launch import examine, maintain, verbs
from glm_launch.errors import ConfigurationError, ExitCode
from glm_launch.settings import Settings
from glm_launch.ui import Ui

PROGRAMS = ("ssh", "docker", "rsync", "scp", "ping", "ip", "nvidia-smi")
VERBS: dict[str, Callable[[Ui], int]] = {
    "start": verbs.start, "restart": verbs.restart, "stop": verbs.stop,
    "rollback": maintain.rollback, "download": maintain.download, "key": maintain.key,
    "plan": lambda ui: verbs.show_plan(ui, as_json=False),
    "status": lambda ui: verbs.status(ui, as_json=True),
    "doctor": lambda ui: examine.doctor(ui, as_json=False),
    "logs": lambda ui: verbs.show_logs(ui, "head", follow=False, count=1, as_json=False),
}  # fmt: skip
# Any text is a folder, a repository or a secret; these are judged when they are used.
FREE = {
    "MODEL", "MODEL_REVISION", "MODEL_FALLBACK", "DFLASH_MODEL", "DFLASH_REVISION", "VLLM_API_KEY",
    "HF_TOKEN", "GHCR_TOKEN", "GLM_STATE_DIR",
}  # fmt: skip


def bounds(field: FieldInfo) -> tuple[float, float] | None:
    """The smallest and the largest allowed number, None for a field that is no number."""
    limits = [*field.metadata, *(one for part in get_args(field.annotation) for one in [part])]
    low = next((limit.ge for limit in limits if isinstance(limit, Ge)), None)
    high = next((limit.le for limit in limits if isinstance(limit, Le)), None)
    return None if low is None or high is None else (float(low), float(high))


def bad_values(name: str, field: FieldInfo) -> list[str]:
    """Texts that this field must refuse."""
    annotation: Any = field.annotation
    limits = bounds(field)
    if limits is not None:
        low, high = limits
        return [repr(low - 1).removesuffix(".0"), repr(high + 1).removesuffix(".0"), "many", "nan"]
    if annotation is bool:
        return ["perhaps", "2"]
    if typing.get_origin(annotation) is Literal:
        return ["no-such-choice", "7"]
    if SecretStr in get_args(annotation) or name in FREE:
        return []
    return {
        "LIMIT_MM": ["audio=1"], "EXTRA_ARGS": ["--port 1", "'open"], "ENGINE_COMMAND": ["'open"],
        "VLLM_API_KEY_FILE": ["/nonexistent/key"], "PRESET": ["no-such-preset"],
        "CUDAGRAPH_SIZES": ["0", "9000"], "API_HOST": ["a b"], "HEAD_IP": ["1.2.3"],
        "WORKER_IP": ["10.0.0.1,1.2.3"],
    }.get(name, ["-x y;"])  # fmt: skip


CASES = [
    pytest.param(name, value, id=f"{name}={value}")
    for name, field in Settings.model_fields.items()
    for value in bad_values(name, field)
]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A PATH whose programs note that they were called; no setting of this machine's shell."""
    log, tools = tmp_path / "calls", tmp_path / "bin"
    tools.mkdir()
    for name in PROGRAMS:
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{log}\nexit 1\n')
        (tools / name).chmod(0o755)
    for name in Settings.model_fields:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("GLM_ENV_FILE", str(tmp_path / "env"))
    monkeypatch.setenv("GLM_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "env").write_text("")
    for name, value in {
        "MODEL": "org/model", "SPEC_METHOD": "none", "HEAD_IP": "10.99.0.1",
        "WORKER_IP": "10.99.0.2", "IMAGE": "reg.example/glm:1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield log


def refused(verb: str) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        VERBS[verb](Ui())
    assert caught.value.exit_code == ExitCode.BAD_CONFIGURATION
    return caught.value


def test_every_setting_that_can_be_wrong_has_a_case() -> None:
    with_case = {case.values[0] for case in CASES}
    assert set(Settings.model_fields) - with_case == FREE


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_bad_value_ends_a_start_with_2_and_calls_nothing(
    calls: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert value.split(",")[-1] in str(refused("start"))
    assert not calls.exists()
    assert not Path(os.environ["GLM_STATE_DIR"]).exists()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_alike(calls: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setenv("MAX_NUM_SEQS", "0")
    monkeypatch.setenv("WORKER_IP", "10.99.0.2,10.99.0.3")
    assert len(refused(verb).findings) == 1
    monkeypatch.delenv("MAX_NUM_SEQS")
    assert "may be 1, 2, 4; leave one node out" in str(refused(verb))
    assert not calls.exists()


NUMBERS = [name for name, field in Settings.model_fields.items() if bounds(field)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(name=st.sampled_from(NUMBERS), beyond=st.integers(1, 10**12), below=st.booleans())
def test_any_number_out_of_range_is_refused(
    calls: Path, name: str, beyond: int, below: bool
) -> None:
    limits = bounds(Settings.model_fields[name])
    assert limits is not None
    low, high = limits
    value = repr(low - beyond if below else high + beyond).removesuffix(".0")
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        refused("start")
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})
    assert not calls.exists()


def test_the_recording_works_and_the_command_line_exits_with_2(calls: Path) -> None:
    """The check of the check: a good configuration does call ssh."""
    command = [sys.executable, "-m", "glm_launch", "doctor"]
    packages = ":".join(str(Path(__file__).parents[2] / n) for n in ("launcher", "overlay"))
    env = os.environ | {"PYTHONPATH": packages}
    good = subprocess.run(command, env=env, capture_output=True, text=True)
    assert good.returncode == 3 and "ssh" in calls.read_text()
    calls.unlink()
    bad = subprocess.run(command, env=env | {"PORT": "0"}, capture_output=True, text=True)
    assert bad.returncode == 2 and "PORT=0 (from shell)" in bad.stderr
    assert not calls.exists()
