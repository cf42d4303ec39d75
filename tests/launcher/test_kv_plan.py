"""`plan --kv`: what the settings make of the cache, said in lines and in JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3.format import kv_plan
from glm_launch import kv_arguments, kv_view
from glm_launch.errors import ConfigurationError
from glm_launch.kv_view import GIB, Card
from glm_launch.settings import Settings
from glm_launch.ui import Ui

TINY = Path(__file__).parents[2] / "bench" / "nano" / "model" / "full-4bpw"
AMPERE = Card(64 * GIB, (8, 0))


def settings(**values: Any) -> Settings:
    return Settings.model_validate({"SPEC_METHOD": "none", "RUNTIME": "local", **values})


def test_the_published_geometry_counts_without_a_folder() -> None:
    seen = kv_view.view(settings(MODEL="someone/a-hub-name", RANKS=2), Card())
    assert "published" in seen.source
    assert sum(group.layers for group in seen.plan.groups) == 2 * 11 + 34 + 11


def test_a_folder_says_its_own_geometry() -> None:
    seen = kv_view.view(settings(MODEL=str(TINY)), Card())
    assert seen.source.endswith("config.json")
    assert sum(group.layers for group in seen.plan.groups) == 3 + 2 + 1


def test_one_request_needs_the_more_the_longer_it_is() -> None:
    plan = kv_view.view(settings(), Card()).plan
    needs = [plan.request_bytes(tokens) for tokens in kv_plan.LENGTHS]
    assert needs == sorted(needs)
    assert plan.fixed_bytes < needs[0]


@pytest.mark.parametrize(
    ("key", "value"), [("KDA_STATE_DTYPE", "bfloat16"), ("DRAFT_KV_CACHE_DTYPE", "fp8")]
)
def test_smaller_types_lower_the_fixed_cost(key: str, value: str) -> None:
    base = {"SPEC_METHOD": "dflash", "RANKS": 2, "KV_CACHE_DTYPE": "fp8"}
    before = kv_view.view(settings(**base), AMPERE).plan
    after = kv_view.view(settings(**base, **{key: value}), AMPERE).plan
    assert after.fixed_bytes < before.fixed_bytes


@pytest.mark.parametrize(("major", "row_bytes"), [(8, 1024), (9, 1024), (10, 512), (12, 656)])
def test_auto_rows_are_those_that_vllm_stores(major: int, row_bytes: int) -> None:
    seen = kv_view.view(settings(), Card(0, (major, 0)))
    assert seen.options.row.row_bytes == row_bytes


def test_a_pool_of_named_bytes_counts_as_it_is() -> None:
    seen = kv_view.view(settings(KV_CACHE_MEMORY_BYTES=8 * GIB), AMPERE)
    assert (seen.pool_bytes, seen.pool_source) == (8 * GIB, "KV_CACHE_MEMORY_BYTES")


def test_what_does_not_fit_is_said_with_what_would_help() -> None:
    seen = kv_view.view(
        settings(SPEC_METHOD="dflash", RANKS=2, MAX_MODEL_LEN=393216, KV_CACHE_DTYPE="fp8"),
        AMPERE,
        200 * GIB,
    )
    said = kv_view.verdict(seen)
    assert "does not fit" in said
    assert "KDA_STATE_DTYPE=bfloat16" in said
    assert "DRAFT_KV_CACHE_DTYPE=fp8" in said


def test_what_fits_is_said() -> None:
    seen = kv_view.view(settings(KV_CACHE_MEMORY_BYTES=60 * GIB, MAX_MODEL_LEN=8192), AMPERE)
    assert kv_view.verdict(seen).startswith("one request of 8192 tokens fits")


@given(pool=st.integers(0, 80), ranks=st.sampled_from([1, 2, 4]), drafts=st.integers(1, 15))
def test_the_longest_request_fits_and_a_block_more_does_not(
    pool: int, ranks: int, drafts: int
) -> None:
    seen = kv_view.view(
        settings(
            SPEC_METHOD="dflash", RANKS=ranks, DFLASH_TOKENS=drafts,
            KV_CACHE_MEMORY_BYTES=pool * GIB,
        ),
        AMPERE,
    )  # fmt: skip
    plan, size = seen.plan, seen.pool_bytes
    longest = plan.longest(size)
    if longest:
        assert plan.concurrency(size, longest) >= 1
        assert plan.concurrency(size, longest + plan.block_tokens) < 1


def test_every_block_is_a_multiple_of_the_grain_of_hits() -> None:
    for ranks in (1, 2, 4):
        for row in ("auto", "fp8"):
            for capability in ((8, 0), (9, 0), (12, 0)):
                seen = kv_view.view(settings(RANKS=ranks, KV_CACHE_DTYPE=row), Card(0, capability))
                assert seen.plan.block_tokens % Settings().PREFIX_HIT_TOKENS == 0


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """What the verb prints for these settings and options."""
    monkeypatch.setenv("GLM_ENV_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("GLM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SPEC_METHOD", "none")

    def show(capability: str = "8.0", *, as_json: bool = False) -> str:
        out = io.StringIO()
        kv_view.show(Ui(out=out), as_json=as_json, gpu_gib=64, capability=capability)
        return out.getvalue()

    return show


def test_the_verb_prints_lines(shown: Callable[..., str]) -> None:
    said = shown()
    for word in ("block", "fixed", "verdict", "1048576", "KDA state"):
        assert word in said


def test_the_verb_prints_json(shown: Callable[..., str]) -> None:
    value = json.loads(shown(as_json=True))
    assert value["block_bytes"] > 0
    assert [one["tokens"] for one in value["requests"]] == list(kv_plan.LENGTHS)


def test_a_wrong_capability_is_a_bad_configuration(shown: Callable[..., str]) -> None:
    with pytest.raises(ConfigurationError, match="ampere"):
        shown("ampere")


def test_the_settings_reach_the_engine() -> None:
    flags = dict(
        kv_arguments.of(
            settings(
                KDA_STATE_DTYPE="bfloat16", KV_PARKING_GIB=32, INDEXER_WORKSPACE_MB=64,
                MAX_MODEL_LEN=131072,
            )
        )
    )  # fmt: skip
    assert flags["--mamba-ssm-cache-dtype"] == "bfloat16"
    assert flags["--prefix-match-unit"] == 256
    assert (flags["--kv-offloading-size"], flags["--kv-offloading-backend"]) == (32, "native")
    assert flags[kv_arguments.INDEXER_FACTOR] == 5


def test_untouched_settings_change_nothing_but_the_grain() -> None:
    assert {flag for flag, value in kv_arguments.of(settings()) if value} == {"--prefix-match-unit"}


@given(tokens=st.integers(2048, 2**20), budget=st.integers(0, 2**30))
def test_the_gather_buffer_stays_within_its_budget_where_it_can(tokens: int, budget: int) -> None:
    factor = kv_plan.indexer_factor(tokens, budget)
    assert factor == 1 or kv_plan.indexer_workspace(tokens, factor) <= budget
    assert factor == kv_plan.INDEXER_FACTOR or (
        kv_plan.indexer_workspace(tokens, factor + 1) > budget
    )
