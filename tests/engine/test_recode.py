"""The dense recode in the engine: small divergence, the same text on any number of ranks, drafts.

The trained miniature is scored and served, because random weights do not tell a good projection
from a bad one. Limits of the mean KL against the BF16 dense part are those the recode promises.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import MINIATURE, openings, perform
from equivalence import MAX_WIDE_SHARE, Line
from logits import mean_kl

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
TEXTS = json.loads((ROOT / "tests" / "bench" / "nano_panel.json").read_text())["texts"]
TARGET = MINIATURE / "tr3"
ENCODING_S = 3600
LIMITS = {"fp8": 0.01, "int8": 0.005, "exl3": 0.005}
Env = dict[str, str]
Scored = tuple[list[np.ndarray], dict[str, Any]]


def engine(**more: Any) -> dict[str, Any]:
    return {"model": str(TARGET), "enable_prefix_caching": False, **more}


@pytest.fixture(scope="session")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`scored(**env)` -> log-probabilities per text, and what the process had loaded."""

    @cache
    def score(env: tuple[tuple[str, str], ...]) -> Scored:
        folder = tmp_path_factory.mktemp("logits")
        multimodal = {"image": 0, "video": 0}
        texts = [text[:192] for text in TEXTS[:4]]
        job = {"engine": {"model": str(TARGET), "limit_mm_per_prompt": multimodal}, "texts": texts}
        made = perform("logits.py", job, folder, env=dict(env), result="result.npz")
        with np.load(made) as file:
            tables = [file[str(number)] for number in range(len(texts))]
            return tables, json.loads(str(file["loaded"]))

    return lambda **env: score(tuple(sorted(env.items())))


@pytest.fixture(scope="session")
def exl3(tmp_path_factory: pytest.TempPathFactory) -> Env:
    """The miniature recoded at six bits, by the command; minutes on a CPU."""
    cache_root = os.environ.get("GLM_EXL3_TEST_DENSE_CACHE") or str(tmp_path_factory.mktemp("k6"))
    command = [sys.executable, "-m", "glm_exl3.recode", str(TARGET), "--cache", cache_root]
    subprocess.run(command, check=True)
    return {"GLM_EXL3_DENSE_RECODE": "exl3", "GLM_EXL3_DENSE_CACHE": cache_root}


def recoded(scheme: str) -> Env:
    return {"GLM_EXL3_DENSE_RECODE": scheme}


def judge(scored: Any, env: Env) -> None:
    plain, loaded = scored()
    assert not loaded["recode"]
    changed, loaded = scored(**env)
    assert loaded["recode"] or env["GLM_EXL3_DENSE_RECODE"] == "exl3"
    kl = mean_kl(plain, changed)
    print(f"mean KL {kl:.5f} nats, {env}")
    assert 0 < kl <= LIMITS[env["GLM_EXL3_DENSE_RECODE"]]


def equal_on_two_ranks(run_engine: Any, env: Env, **more: Any) -> None:
    lines = run_engine(engine(), openings(), 24, env=env)["lines"]
    cut = engine(tensor_parallel_size=2, **more)
    result = run_engine(cut, openings(), 24, reference=lines, wide_share=MAX_WIDE_SHARE, env=env)
    assert not result["comparison"]["broken"], result["comparison"]
    assert Line(**lines[0]).tokens


def test_fp8_is_near_the_checkpoint(scored: Any) -> None:
    judge(scored, recoded("fp8"))


def test_fp8_is_equal_on_two_ranks_and_drafted(run_engine: Any) -> None:
    mtp = {"method": "mtp", "num_speculative_tokens": 2}
    equal_on_two_ranks(run_engine, recoded("fp8"), speculative_config=mtp)


@pytest.mark.long
def test_int8_is_near_the_checkpoint(scored: Any) -> None:
    judge(scored, recoded("int8"))


@pytest.mark.long
def test_int8_is_equal_on_two_ranks(run_engine: Any) -> None:
    equal_on_two_ranks(run_engine, recoded("int8"))


@pytest.mark.long
@pytest.mark.timeout(ENCODING_S)
def test_exl3_is_near_the_checkpoint(scored: Any, exl3: Env) -> None:
    judge(scored, exl3)


@pytest.mark.long
@pytest.mark.timeout(ENCODING_S)
def test_exl3_is_equal_on_two_ranks(run_engine: Any, exl3: Env) -> None:
    drafter = {
        "method": "dflash",
        "model": str(MINIATURE / "drafter"),
        "num_speculative_tokens": 7,
    }
    equal_on_two_ranks(run_engine, exl3, speculative_config=drafter)
