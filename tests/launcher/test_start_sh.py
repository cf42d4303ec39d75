"""start.sh with a Python that only pretends: what it installs, when again, and interruptions."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE_PYTHON = r"""#!/usr/bin/env bash
# Stands in for python: makes a .venv holding itself, and notes every call.
echo "$*" >>"$CALLS"
case "$1 ${2:-} ${3:-}" in
-c*) echo "${FAKE_VERSION:-3.11}" ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "${FAKE_VERSION:-3.11}" >"$3/pyvenv.cfg" ;;
"-m pip -V") ;;
"-m pip install")
    [[ $* != *torch-cpu* || -z ${NO_CPU_TORCH:-} ]] || exit 1
    [[ -z ${PIP_FAILS:-} ]] || { echo "no network" && exit 1; }
    [[ -z ${PIP_SLEEPS:-} ]] || exec sleep "$PIP_SLEEPS"
    ;;
"-m glm_launch "*) echo "launched: ${*:3}" ;;
esac
"""  # noqa: E501 (shell text)


@dataclass
class Checkout:
    """A copy of start.sh and its locks, with a PATH where Python is fake."""

    folder: Path
    env: dict[str, str]

    @property
    def calls(self) -> list[str]:
        log = Path(self.env["CALLS"])
        return log.read_text().splitlines() if log.exists() else []

    @property
    def installs(self) -> list[str]:
        """What pip was asked to install, dry runs left out."""
        found = [call.split()[-1] for call in self.calls if call.startswith("-m pip install")
                 and "--dry-run" not in call]  # fmt: skip
        return [Path(name).stem if name.endswith(".txt") else "plugin" for name in found]

    def __call__(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.folder / "start.sh"), *arguments],
            env=self.env | env, capture_output=True, text=True, timeout=30,
        )  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    folder, tools = tmp_path / "checkout", tmp_path / "bin"
    tools.mkdir()
    shutil.copytree(ROOT / "config" / "locks", folder / "config" / "locks")
    shutil.copy(ROOT / "start.sh", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (tools / "python3.11").write_text(FAKE_PYTHON)
    (tools / "python3.11").chmod(0o755)
    for name in ("bash", "cat", "cp", "cut", "dirname", "env", "flock", "grep", "mkdir", "rm",
                 "sed", "sha256sum", "sleep", "tail"):  # fmt: skip
        found = shutil.which(name)
        assert found, name
        (tools / name).symlink_to(found)
    return Checkout(folder, {"PATH": str(tools), "CALLS": str(tmp_path / "calls")})


def test_a_verb_installs_only_what_it_needs(checkout: Checkout) -> None:
    done = checkout("status", "--json")
    assert (done.returncode, done.stdout) == (0, "launched: status --json\n"), done.stderr
    assert checkout.installs == ["launcher"]


def test_demo_adds_the_engine_and_test_the_tools(checkout: Checkout) -> None:
    assert checkout("demo", "--once").stdout == "launched: demo --once\n"
    assert checkout.installs == ["launcher", "cpu", "torch-cpu", "plugin"]
    assert checkout("test", "-k", "x").stdout == "launched: test -k x\n"
    assert checkout.installs == ["launcher", "cpu", "torch-cpu", "plugin", "dev"]


def test_without_a_verb_it_starts(checkout: Checkout) -> None:
    assert checkout().stdout == "launched: \n"
    assert checkout.installs == ["launcher"]


def test_the_second_call_installs_nothing(checkout: Checkout) -> None:
    checkout("status")
    before = len(checkout.calls)
    checkout("status")
    assert checkout.calls[before:] == ["-m glm_launch status"]


def test_a_changed_lock_installs_again(checkout: Checkout) -> None:
    checkout("status")
    with (checkout.folder / "config/locks/launcher.txt").open("a") as lock:
        lock.write("# changed\n")
    checkout("status")
    assert checkout.installs == ["launcher", "launcher"]


def test_the_cuda_build_is_announced_when_there_is_no_cpu_build(checkout: Checkout) -> None:
    done = checkout("demo", NO_CPU_TORCH="1")
    assert "2.7 GB" in done.stderr
    assert checkout.installs == ["launcher", "cpu", "torch-cuda", "plugin"]


def test_help_needs_no_python(checkout: Checkout) -> None:
    done = checkout("--help", PATH=checkout.env["PATH"])
    assert done.returncode == 0 and "./start.sh demo" in done.stdout
    assert "set -euo" not in done.stdout and checkout.calls == []


def test_no_python_is_told_with_the_fix(checkout: Checkout) -> None:
    (Path(checkout.env["PATH"]) / "python3.11").unlink()
    done = checkout("status")
    assert done.returncode == 3 and "apt install python3.11-venv" in done.stderr


def test_another_python_is_tried_and_said_to_be_untested(checkout: Checkout) -> None:
    tools = Path(checkout.env["PATH"])
    (tools / "python3.11").rename(tools / "python3")
    done = checkout("status", FAKE_VERSION="3.13")
    assert done.returncode == 0 and "python3, which is untested" in done.stderr


def test_too_old_a_python_is_not_taken(checkout: Checkout) -> None:
    tools = Path(checkout.env["PATH"])
    (tools / "python3.11").rename(tools / "python3")
    assert checkout("status", FAKE_VERSION="3.10").returncode == 3


def test_a_named_python_is_preferred(checkout: Checkout, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copy(Path(checkout.env["PATH"]) / "python3.11", mine)
    (Path(checkout.env["PATH"]) / "python3.11").unlink()
    assert checkout("status", GLM_PYTHON=str(mine)).returncode == 0


def test_a_failed_install_is_told_and_tried_again(checkout: Checkout) -> None:
    done = checkout("status", PIP_FAILS="1")
    assert done.returncode == 3 and "no network" in done.stderr and "launched" not in done.stdout
    again = checkout("status")
    assert again.returncode == 0 and "interrupted" not in again.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_set_up_is_made_again(checkout: Checkout, number: signal.Signals) -> None:
    process = subprocess.Popen(
        ["bash", str(checkout.folder / "start.sh"), "status"],
        env=checkout.env | {"PIP_SLEEPS": "20"}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 10
    while not checkout.installs:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if number == signal.SIGKILL:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    process.wait(timeout=10)
    (checkout.folder / ".venv" / "half").touch()
    done = checkout("status")
    assert done.returncode == 0 and "interrupted: making .venv again" in done.stderr
    assert not (checkout.folder / ".venv" / "half").exists()


def test_a_venv_whose_python_is_broken_is_made_again(checkout: Checkout) -> None:
    (checkout.folder / ".venv" / "bin").mkdir(parents=True)
    done = checkout("status")
    assert done.returncode == 0 and "making .venv again" in done.stderr


def test_two_set_ups_do_not_run_at_once(checkout: Checkout) -> None:
    first = subprocess.Popen(
        ["bash", str(checkout.folder / "start.sh"), "status"],
        env=checkout.env | {"PIP_SLEEPS": "2"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 10
    while not checkout.installs:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second = checkout("status")
    assert second.returncode == 0 and "waiting for another set-up" in second.stderr
    assert first.wait(timeout=10) == 0
    assert checkout.installs == ["launcher"]
