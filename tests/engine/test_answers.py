"""Greedy text does not depend on ranks, drafting, the prefix cache or chunked prefill.

Ranks are compared on the trained miniature: sums in another order move its text less than that of
random weights. Drafting is compared on the tiny checkpoints, whose drafts are partly accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import MINIATURE, Run, openings, prompts
from equivalence import MAX_WIDE_SHARE, Line, compare
from service import HttpGenerate, serving

pytestmark = pytest.mark.engine

FAMILIES = (pytest.param("tr3", marks=pytest.mark.long), "full")
DRAFTS = {"mtp": 2, "dflash": 7}
Reference = Callable[[str], dict[str, Any]]


def assert_equal(result: dict[str, Any]) -> None:
    comparison = result["comparison"]
    assert not comparison["broken"], comparison
    assert comparison["positions"] >= 8 * 32


def accepted_share(counters: dict[str, Any]) -> float:
    return (
        counters["vllm:spec_decode_num_accepted_tokens"]
        / counters["vllm:spec_decode_num_draft_tokens"]
    )


def speculation(method: str, checkpoints: dict[str, Path], family: str) -> dict[str, Any]:
    drafter = {"model": str(checkpoints[f"{family}-drafter"])} if method == "dflash" else {}
    return {"method": method, "num_speculative_tokens": DRAFTS[method], **drafter}


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("tr3", 2),
        ("full-4bpw", 4),
        pytest.param("tr3", 4, marks=pytest.mark.long),
        pytest.param("full-4bpw", 2, marks=pytest.mark.long),
    ],
)
def test_ranks(
    family: str, ranks: int, miniature_references: Callable[[str], list[Line]], run_engine: Run
) -> None:
    engine = {
        "model": str(MINIATURE / family),
        "tensor_parallel_size": ranks,
        "enable_prefix_caching": False,
    }
    lines = [vars(line) for line in miniature_references(family)]
    assert_equal(run_engine(engine, openings(), 32, reference=lines, wide_share=MAX_WIDE_SHARE))


@pytest.mark.parametrize("family", [pytest.param("tr3", marks=pytest.mark.long), "full-4bpw"])
def test_two_nodes(
    family: str, miniature_references: Callable[[str], list[Line]], tmp_path: Path
) -> None:
    with serving(MINIATURE / family, tmp_path, {}) as base:
        reference = miniature_references(family)
        result = compare(openings(), reference, HttpGenerate(base), MAX_WIDE_SHARE)
    assert_equal({"comparison": result.as_json()})


@pytest.mark.parametrize("method", DRAFTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafting(
    family: str, method: str, checkpoints: dict[str, Path], references: Reference, run_engine: Run
) -> None:
    engine = {
        "model": str(checkpoints[family]),
        "enable_prefix_caching": False,
        "speculative_config": speculation(method, checkpoints, family),
    }
    result = run_engine(engine, prompts(), 32, reference=references(family)["lines"])
    assert_equal(result)
    assert 0.2 <= accepted_share(result["counters"]) <= 0.8
    first = result["counters"]["vllm:spec_decode_num_accepted_tokens_per_pos"][0]
    assert 0 < first < result["counters"]["vllm:spec_decode_num_drafts"]


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_and_prefix_cache(
    family: str, checkpoints: dict[str, Path], references: Reference, run_engine: Run
) -> None:
    """Prompts in pieces of at most 192 tokens, and again behind what the first time stored."""
    engine = {
        "model": str(checkpoints[family]),
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 192,
        "enable_chunked_prefill": True,
    }
    lines = references(family)["lines"]
    result = run_engine(engine, prompts(), 32, reference=lines, repeat=True)
    assert_equal(result)
    assert result["counters"]["vllm:prefix_cache_hits"] > 0
