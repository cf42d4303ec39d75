"""Lookup and adaptive k on the real engine: the greedy text is that of no drafting at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conftest import MINIATURE, Run, openings
from equivalence import Line

pytestmark = pytest.mark.engine

TOKENS = 32


def test_lookup_with_an_adaptive_length_writes_what_no_drafting_writes(
    run_engine: Run, miniature_references: Callable[[str], list[Line]]
) -> None:
    engine: dict[str, Any] = {
        "model": str(MINIATURE / "full-4bpw"),
        "enable_prefix_caching": False,
        "max_num_seqs": 4,
        "scheduler_cls": "glm_exl3.spec.adaptive.AdaptiveScheduler",
        "speculative_config": {
            "method": "dflash",
            "model": str(MINIATURE / "drafter"),
            "num_speculative_tokens": 11,
            "num_speculative_tokens_per_batch_size": [[1, 1, 11], [2, 2, 4], [3, 3, 2]],
        },
    }
    result = run_engine(
        engine,
        openings(),
        TOKENS,
        reference=[vars(line) for line in miniature_references("full-4bpw")],
        env={"GLM_EXL3_HYBRID_DRAFT": "1", "GLM_EXL3_HYBRID_MATCH": "2"},
    )
    assert result["comparison"]["broken"] == []
    by_place = result["counters"]["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert len(by_place) == 11
    assert sum(by_place) > 0
