"""vLLM's arguments for the settings of the KV cache. Pure."""

from __future__ import annotations

from glm_exl3.format import kv_plan
from glm_launch.settings import Settings

INDEXER_LIMIT = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
"""vLLM's variable for the scores of one prefill piece; it cuts the piece's rows to stay below."""
INDEXER_FACTOR = "--attention-config.sparse_mla_prefill_workspace_factor"


def of(settings: Settings) -> list[tuple[str, object]]:
    """Flags and values; an empty value leaves one out."""
    parking = settings.KV_PARKING_GIB
    budget = settings.INDEXER_WORKSPACE_MB * 2**20
    length = settings.MAX_MODEL_LEN or kv_plan.LENGTHS[-1]
    state = settings.KDA_STATE_DTYPE
    return [
        ("--mamba-ssm-cache-dtype", "" if state == "auto" else state),
        ("--prefix-match-unit", settings.PREFIX_HIT_TOKENS),
        ("--kv-offloading-size", parking),
        ("--kv-offloading-backend", "native" if parking else ""),
        (INDEXER_FACTOR, kv_plan.indexer_factor(length, budget) if budget else ""),
    ]
