"""Row layouts in the engine: how far answers move, and that they do not depend on ranks.

Texts are longer than the indexer's budget, so that tokens are chosen. The limits are those of the
issue for real weights; the figures of all layouts are in bench/kv/results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import MINIATURE, Run, openings, prompts
from equivalence import MAX_WIDE_SHARE

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
LIMIT = 1e-2


def divergence(model: Path, out: Path, *arguments: str) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "kv.divergence", str(model), str(out), *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'overlay'}:{ROOT / 'bench'}"}
    subprocess.run(command, check=True, timeout=500, env=environment)
    found: dict[str, dict[str, float]] = json.loads(out.read_text())["layouts"]
    return found


def test_int8_rows_hardly_move_the_miniature(tmp_path: Path) -> None:
    found = divergence(
        MINIATURE / "full-4bpw",
        tmp_path / "r.json",
        *("--layouts", "int8", "--tokens", "900", "--texts", "1"),
    )
    assert found["int8"]["positions"] == 899
    assert 0 < found["int8"]["mean_kl"] <= LIMIT, found


@pytest.mark.long
@pytest.mark.parametrize("model", ["tr3", "full-3bpw"])
def test_every_layout_stays_within_its_limit(model: str, tmp_path: Path) -> None:
    found = divergence(MINIATURE / model, tmp_path / "r.json")
    assert all(row["mean_kl"] <= LIMIT for row in found.values()), found


@pytest.mark.long
def test_every_layout_stays_within_its_limit_on_random_weights(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    found = divergence(checkpoints["full"], tmp_path / "r.json")
    assert all(row["mean_kl"] <= LIMIT for row in found.values()), found


@pytest.mark.long
@pytest.mark.parametrize("layout", ["glm_fp8", "glm_int8"])
def test_rows_do_not_depend_on_ranks(layout: str, run_engine: Run) -> None:
    engine = {
        "model": str(MINIATURE / "full-4bpw"),
        "enable_prefix_caching": False,
        "kv_cache_dtype": layout,
    }
    asked = [*openings(), prompts((900,))[0]]
    lines = run_engine(engine, asked, 32)["lines"]
    two = run_engine(
        engine | {"tensor_parallel_size": 2},
        asked,
        32,
        reference=lines,
        wide_share=MAX_WIDE_SHARE,
    )
    assert not two["comparison"]["broken"], two["comparison"]


@pytest.mark.long
@pytest.mark.parametrize("method", ["mtp", "dflash"])
def test_drafters_work_beside_int8_rows(
    method: str, checkpoints: dict[str, Path], run_engine: Run
) -> None:
    engine = {
        "model": str(checkpoints["full"]),
        "enable_prefix_caching": False,
        "kv_cache_dtype": "glm_int8",
    }
    lines = run_engine(engine, prompts(), 32)["lines"]
    drafter = {"model": str(checkpoints["full-drafter"])} if method == "dflash" else {}
    speculation = {"method": method, "num_speculative_tokens": 3, **drafter}
    drafted = run_engine(
        engine | {"speculative_config": speculation}, prompts(), 32, reference=lines
    )
    assert not drafted["comparison"]["broken"], drafted["comparison"]
    assert drafted["counters"]["vllm:spec_decode_num_draft_tokens"] > 0
