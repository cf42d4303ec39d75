"""Which decode ops serve, by setting and GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from glm_exl3 import envs
from glm_exl3.fused import install
from glm_exl3.ops import fused_names


def platform(capability: tuple[int, int] | None, *, cuda: bool = True) -> Any:
    found = capability and SimpleNamespace(major=capability[0], minor=capability[1])
    return SimpleNamespace(is_cuda=lambda: cuda, get_device_capability=lambda: found)


OPS, TOGETHER = "GLM_EXL3_FUSED_OPS", "GLM_EXL3_TOGETHER"
NAMES = {OPS: fused_names.wanted, TOGETHER: fused_names.together}


@pytest.mark.parametrize(
    ("variable", "setting", "capability", "expected"),
    [
        (OPS, None, (9, 0), ("mhc", "kda", "dense", "gate")),
        (OPS, "auto", (9, 0), ("mhc", "kda", "dense", "gate")),
        (OPS, "auto,router", (9, 0), ("router", "mhc", "kda", "dense", "gate")),
        (OPS, "mhc,auto", (9, 0), ("mhc", "kda", "dense", "gate")),
        (OPS, "auto", (8, 0), ()),
        (OPS, "auto", (12, 1), ()),
        (OPS, "auto", None, ()),
        (OPS, "mhc,router", (8, 0), ("mhc", "router")),
        (OPS, "none", (9, 0), ()),
        (TOGETHER, None, (9, 0), envs.TOGETHER_NAMES),
        (TOGETHER, "auto", (12, 1), ()),
        (TOGETHER, "auto,parts", (8, 0), ("parts",)),
        (TOGETHER, "dense,auto", (9, 0), ("dense", "parts", "activation", "shared")),
        (TOGETHER, "parts", (9, 0), ("parts",)),
        (TOGETHER, "none", (9, 0), ()),
    ],
)
def test_auto_is_what_was_measured_on_this_gpu(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    setting: str | None,
    capability: tuple[int, int] | None,
    expected: tuple[str, ...],
) -> None:
    monkeypatch.delenv(variable, raising=False)
    if setting is not None:
        monkeypatch.setenv(variable, setting)
    monkeypatch.setattr("vllm.platforms.current_platform", platform(capability))
    assert NAMES[variable]() == expected


def test_without_a_gpu_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_EXL3_FUSED_OPS", "auto,mhc")
    monkeypatch.setattr("vllm.platforms.current_platform", platform((9, 0), cuda=False))
    assert fused_names.wanted() == () and install.install() == ()
    monkeypatch.delenv("GLM_EXL3_TOGETHER", raising=False)
    assert fused_names.together() == ()


def test_every_measured_op_is_known() -> None:
    assert {name for names in fused_names.MEASURED.values() for name in names} <= set(install.OPS)
    assert set(install.OPS) == set(envs.FUSED_NAMES)
