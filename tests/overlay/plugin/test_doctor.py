"""The self-check shows every problem at once and says so with its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm_exl3 import doctor


def by_name(capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}


@pytest.mark.slow
def test_a_sound_installation_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    found = by_name(capsys)
    assert set(found) == {"settings", "versions", "patches", "registration", "back end"}
    assert "packed-attention" in found["patches"]["detail"]
    assert found["back end"]["detail"].startswith("reference on cpu")


def test_every_failure_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GLM_EXL3_JOIN_TIMEOUT_S", "soon")
    monkeypatch.setattr(doctor.plugin, "vllm_version", lambda: "0.99.0")
    monkeypatch.setattr(doctor, "_registration", lambda: "skipped")
    monkeypatch.setattr(doctor, "_backend", lambda: "skipped")
    assert doctor.main(["--json", "--model", str(tmp_path)]) == 3
    found = by_name(capsys)
    failed = {name for name, entry in found.items() if not entry["ok"]}
    assert failed == {"settings", "versions", "patches", "checkpoint"}
    assert "GLM_EXL3_JOIN_TIMEOUT_S" in found["settings"]["detail"]
    assert "config.json" in found["checkpoint"]["detail"]


def test_text_output_has_one_line_per_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_registration", "_backend"):
        monkeypatch.setattr(doctor, name, lambda: "fine")
    doctor.main([])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all(line.startswith(("ok", "FAIL")) for line in lines)
