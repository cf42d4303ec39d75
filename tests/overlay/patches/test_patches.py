"""Patches: fingerprints of the installed vLLM, refusal of unknown source, applying twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from glm_exl3 import patches
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.patches import document
from glm_exl3.patches.record import Patch, fingerprint, module_file

ROOT = Path(__file__).resolve().parents[3]
SOURCE = '''
"""Module."""

class Layer:
    """Docstring."""

    def build(self, width: int) -> int:
        """Another."""
        # a comment
        return width + {addend}
'''


@pytest.fixture
def module(tmp_path: Path):
    """Write the fake target's source; returns the finder that patches use for it."""

    def write(addend: int = 1, text: str = SOURCE):
        (tmp_path / "fake.py").write_text(text.replace("{addend}", str(addend)))
        return lambda name: tmp_path / f"{name}.py"

    return write


@pytest.fixture(autouse=True)
def nothing_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_applied", set())


def make(known: str, applied: list[str] | None = None, **changes: object) -> Patch:
    values: dict[str, object] = {
        "id": "fake",
        "summary": "changes nothing",
        "targets": ("glm_exl3.envs:Knob.read",),
        "stage": "import",
        "applies_to": "==0.33.0",
        "fingerprints": {"0.33.0": {"glm_exl3.envs:Knob.read": known}},
        "upstream": "none: test",
        "remove_when": "never",
        "off_switch": "GLM_EXL3_PATCH_FAKE",
        "risk": "none",
        "apply": lambda: (applied if applied is not None else []).append("fake"),
    }
    return Patch(**(values | changes))


TARGET = "glm_exl3.envs:Knob.read"


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.id)
def test_the_installed_vllm_is_the_one_each_patch_was_read_against(patch: Patch) -> None:
    from importlib.metadata import version

    assert patch.drift(version("vllm").partition("+")[0]) == ()


def test_fingerprinting_imports_nothing() -> None:
    code = (
        "import sys; from glm_exl3.patches.record import fingerprint;"
        "h = fingerprint('vllm.models.glm5next.common.model:Glm5NextDecoderLayer.__init__');"
        "assert h != 'absent' and 'vllm' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_comments_and_docstrings_do_not_count(module) -> None:
    first = fingerprint("fake:Layer.build", module())
    bare = SOURCE.replace('"""Another."""', "").replace("# a comment", "")
    assert fingerprint("fake:Layer.build", module(text=bare)) == first


def test_a_changed_statement_counts(module) -> None:
    assert fingerprint("fake:Layer.build", module(1)) != fingerprint("fake:Layer.build", module(2))


@pytest.mark.parametrize("target", ["fake:Layer.gone", "fake:Gone", "nowhere.at.all:x"])
def test_a_vanished_target_is_absent(target: str, module) -> None:
    assert fingerprint(target, module() if target.startswith("fake") else None) == "absent"


def test_a_known_target_is_patched_once() -> None:
    applied: list[str] = []
    patch = make(fingerprint(TARGET), applied)
    assert patches.apply_all("import", "0.33.0", [patch]) == ("fake",)
    assert patches.apply_all("import", "0.33.0", [patch]) == ()
    assert applied == ["fake"]


def test_another_stage_is_left_alone() -> None:
    assert patches.apply_all("model", "0.33.0", [make(fingerprint(TARGET))]) == ()


@pytest.mark.parametrize("version", ["0.33.0", "0.34.0"])
def test_unknown_source_refuses_and_names_patch_and_target(version: str) -> None:
    applied: list[str] = []
    with pytest.raises(GlmExl3Error, match=rf"patch fake .*{version}.*Knob\.read"):
        patches.apply_all("import", version, [make("0" * 16, applied)])
    assert not applied


@pytest.mark.parametrize("accepted", ["fake", "all", "other, fake"])
def test_the_operator_may_accept_unknown_source(
    accepted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM_EXL3_ACCEPT_UNKNOWN_VLLM", accepted)
    assert patches.apply_all("import", "0.33.0", [make("0" * 16)]) == ("fake",)


def test_a_patch_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    before = patches.patch_set([make(fingerprint(TARGET))])
    monkeypatch.setenv("GLM_EXL3_PATCH_FAKE", "0")
    assert patches.apply_all("import", "0.33.0", [make(fingerprint(TARGET))]) == ()
    assert patches.patch_set([make(fingerprint(TARGET))]) != before


def test_every_record_is_complete() -> None:
    assert len({patch.id for patch in patches.PATCHES}) == len(patches.PATCHES)
    for patch in patches.PATCHES:
        assert patch.targets
        assert patch.off_switch.startswith("GLM_EXL3_PATCH_")
        for known in patch.fingerprints.values():
            assert set(known) == set(patch.targets)


def test_the_page_is_generated_from_the_records() -> None:
    assert (ROOT / "docs" / "patches.md").read_text() == document.document()


def test_module_files_are_found_in_packages() -> None:
    assert module_file("glm_exl3.patches").name == "__init__.py"
    assert module_file("glm_exl3.envs").name == "envs.py"


def test_attention_is_replaced_in_the_models_module() -> None:
    from glm_exl3.models.attention import PackedLinearAttention, PackedMLAAttention
    from glm_exl3.patches import packed_attention

    packed_attention.apply()
    packed_attention.apply()
    from vllm.models.glm5next.common import model

    assert model.Glm5NextMLAAttention is PackedMLAAttention
    assert model.Glm5NextLinearAttention is PackedLinearAttention
