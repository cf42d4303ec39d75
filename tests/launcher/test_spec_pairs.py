"""A drafter that does not go with its target ends `start` with 2, before anything is touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from glm_launch import drafting
from glm_launch.errors import ConfigurationError, ExitCode
from glm_launch.settings import Settings
from glm_launch.settings_load import load

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "bench" / "nano" / "model"
NO_FILE = Path("/nonexistent")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A copy of the miniature's drafter."""
    folder = tmp_path / "drafter"
    shutil.copytree(MODEL / "drafter", folder)
    return folder


def change(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def codes(**env: str) -> list[str]:
    settings = load({"MODEL": str(MODEL / "full-4bpw"), **env}, NO_FILE).settings
    found = drafting.findings(settings, Path(settings.MODEL), Path(settings.DFLASH_MODEL))
    return [one.code for one in found]


def test_the_miniatures_pairs_go_together(drafter: Path) -> None:
    assert not codes(DFLASH_MODEL=str(drafter))
    assert not codes(SPEC_METHOD="mtp")
    assert not codes(SPEC_METHOD="none", DFLASH_MODEL="/nowhere")


def test_the_real_folders_are_judged(drafter: Path) -> None:
    change(drafter, hidden_size=512, block_size=4)
    assert codes(DFLASH_MODEL=str(drafter), DFLASH_TOKENS="3") == [
        "drafter-hidden",
        "drafter-inputs",
    ]
    assert "drafter-block" in codes(DFLASH_MODEL=str(drafter))


def test_a_target_is_no_drafter() -> None:
    assert codes(DFLASH_MODEL=str(MODEL / "tr3")) == ["drafter-architecture"]


def test_a_target_without_its_mtp_block(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(MODEL / "full-4bpw", folder)
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"] = {
        name: file for name, file in document["weight_map"].items() if ".layers.4." not in name
    }
    index.write_text(json.dumps(document))
    assert codes(MODEL=str(folder), SPEC_METHOD="mtp") == ["mtp-absent"]


def test_what_cannot_be_read_is_left_to_the_other_checks(tmp_path: Path) -> None:
    assert not codes(DFLASH_MODEL=str(tmp_path / "nothing"))
    assert not codes(MODEL=str(tmp_path / "nothing"), SPEC_METHOD="mtp")


def test_start_ends_with_2_and_leaves_no_trace(launcher: Any, drafter: Path) -> None:
    change(drafter, is_causal=True)
    env = {"MODEL": str(MODEL / "tr3"), "SPEC_METHOD": "dflash", "DFLASH_MODEL": str(drafter)}
    done = launcher("start", **env)
    assert done.returncode == ExitCode.BAD_CONFIGURATION, done.stderr
    assert "causal" in done.stderr and "fix:" in done.stderr
    assert not launcher.leaders()


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"DFLASH_DRAFT_TP": "1"}, "draft-tp"),
        ({"CUDAGRAPH_SIZES": "1,2,4"}, "draft-graphs"),
        ({"CUDAGRAPH_SIZES": "2", "SPEC_METHOD": "mtp"}, "draft-graphs"),
        ({"CUDAGRAPH_SIZES": "9"}, "draft-graphs"),
        (
            {"CUDAGRAPH_SIZES": "8", "HYBRID_DRAFT": "1", "HYBRID_DRAFT_TOKENS": "15"},
            "draft-graphs",
        ),
        ({"CUDAGRAPH_SIZES": "8", "ADAPTIVE_K": "ema"}, "draft-graphs"),
        ({"CUDAGRAPH_SIZES": "32", "MAX_NUM_SEQS": "2"}, "draft-graphs"),
        ({"MAX_NUM_BATCHED_TOKENS": "8"}, "draft-room"),
        (
            {
                "MAX_NUM_BATCHED_TOKENS": "12",
                "HYBRID_DRAFT": "1",
                "HYBRID_DRAFT_TOKENS": "15",
            },
            "draft-room",
        ),
        ({"MAX_NUM_BATCHED_TOKENS": "3", "SPEC_METHOD": "mtp"}, "draft-room"),
    ],
)
def test_settings_that_do_not_go_together(env: dict[str, str], code: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(env, NO_FILE)
    assert [finding.code for finding in caught.value.findings] == [code]


@pytest.mark.parametrize(
    "env",
    [
        {"DFLASH_DRAFT_TP": "1", "RANKS": "1"},
        {"DFLASH_DRAFT_TP": "2"},
        {"CUDAGRAPH_SIZES": "8"},
        {"CUDAGRAPH_SIZES": "1,10"},
        {"CUDAGRAPH_SIZES": "3,5,8", "ADAPTIVE_K": "ema"},
        {"CUDAGRAPH_SIZES": "8", "HYBRID_DRAFT": "1", "HYBRID_DRAFT_TOKENS": "3"},
        {"CUDAGRAPH_SIZES": "16", "HYBRID_DRAFT": "1", "HYBRID_DRAFT_TOKENS": "15"},
        {"CUDAGRAPH_SIZES": "2", "SPEC_METHOD": "none"},
        {"CUDAGRAPH_SIZES": "2", "ENFORCE_EAGER": "1"},
        {"MAX_NUM_BATCHED_TOKENS": "9"},
    ],
)
def test_settings_that_do(env: dict[str, str]) -> None:
    load(env, NO_FILE)


@pytest.mark.parametrize(
    ("env", "refused"),
    [
        ({"PRESET": "cmp170hx-2x"}, True),
        ({"PRESET": "h200-1x"}, False),
        ({"PRESET": "cmp170hx-2x", "ENFORCE_EAGER": "1"}, False),
        ({"PRESET": "cmp170hx-2x", "SPEC_METHOD": "mtp"}, False),
        ({}, False),
    ],
)
def test_an_fp8_cache_of_the_drafter_by_the_presets_gpus(
    env: dict[str, str], refused: bool
) -> None:
    settings = Settings.model_validate({"DRAFT_KV_CACHE_DTYPE": "fp8", **env})
    found = drafting.findings(settings, Path("/nonexistent"), None)
    assert [one.code for one in found] == ["drafter-kv-dtype"] * refused


def test_the_drafters_cache_stays_unquantised_beside_an_fp8_one() -> None:
    from glm_launch.facts import Facts
    from glm_launch.plan import build

    def speculation(**env: str) -> dict[str, object]:
        settings = load({"MODEL": "/m", "DFLASH_MODEL": "/d", **env}, NO_FILE).settings
        argv = build(settings, Facts((0, 1), 2, ("vllm",))).ranks[0].argv
        return json.loads(argv[argv.index("--speculative-config") + 1])

    assert speculation(KV_CACHE_DTYPE="fp8")["kv_cache_dtype"] == "auto"
    assert "kv_cache_dtype" not in speculation()
