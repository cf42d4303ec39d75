"""The CPU platform activates only without an accelerator or on request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm_exl3.cpu import accelerator, activation
from glm_exl3.format.errors import GlmExl3Error


def with_node(root: Path, node: str) -> Path:
    path = root / node
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return root


@pytest.mark.parametrize(
    "node",
    ["dev/nvidia0", "dev/nvidia3", "dev/nvhost-gpu", "dev/dxg", "dev/kfd", "dev/accel/accel0"],
)
def test_a_device_node_is_an_accelerator(node, tmp_path):
    found = accelerator.found(with_node(tmp_path, node), count_nvml=lambda: 0)
    assert found is not None
    assert node in found


def test_nvml_devices_are_an_accelerator(tmp_path):
    assert accelerator.found(tmp_path, count_nvml=lambda: 2) == "2 NVML devices"


def test_a_driver_without_devices_is_none(tmp_path):
    with_node(tmp_path, "usr/lib/libcuda.so.1")
    assert accelerator.found(tmp_path, count_nvml=lambda: 0) is None


@pytest.mark.parametrize(
    ("choice", "device", "expected"),
    [
        ("", None, True),
        ("auto", None, True),
        ("auto", "device node dev/nvidia0", False),
        ("cpu", "device node dev/nvidia0", True),
        ("off", None, False),
    ],
)
def test_the_choice_and_the_hardware_decide(choice, device, expected, monkeypatch):
    monkeypatch.setenv(activation.VARIABLE, choice)
    monkeypatch.setattr(accelerator, "found", lambda: device)
    assert activation.wanted() is expected


def test_an_unknown_choice_is_refused(monkeypatch):
    monkeypatch.setenv(activation.VARIABLE, "gpu")
    with pytest.raises(GlmExl3Error, match="auto, cpu, off"):
        activation.platform()


def test_with_an_accelerator_nothing_happens(monkeypatch):
    monkeypatch.delenv(activation.VARIABLE, raising=False)
    monkeypatch.setattr(accelerator, "found", lambda: "device node dev/nvidia0")
    before, finders = dict(os.environ), list(sys.meta_path)
    assert activation.platform() is None
    assert dict(os.environ) == before
    assert sys.meta_path == finders


def test_the_probe_imports_neither_torch_nor_the_platform():
    code = (
        "import sys; from glm_exl3.cpu import accelerator, activation;"
        "accelerator.found = lambda: 'x'; assert activation.platform() is None;"
        "bad = {'torch', 'vllm', 'glm_exl3.cpu.platform'} & set(sys.modules); assert not bad, bad"
    )
    environment = {k: v for k, v in os.environ.items() if k != activation.VARIABLE}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
