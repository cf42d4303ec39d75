"""Log-probabilities of texts by one engine configuration, and the divergence between two.

    python logits.py JOB.json RESULT.npz

The job holds `engine` (keyword arguments of `vllm.LLM`) and `texts`; the result holds one array
`[positions, vocabulary]` in fp32 under the number of each text, and under `loaded` which optional
parts of the plugin the process imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def logprobs(engine: dict[str, Any], texts: list[list[int]]) -> list[np.ndarray]:
    """`[len(text) - 1, vocabulary]` per text."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        enforce_eager=True,
        seed=0,
        max_model_len=1024,
        language_model_only=True,
        max_logprobs=-1,
        enable_prefix_caching=False,
        **engine,
    )
    parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1)
    found = []
    for text in texts:
        (output,) = llm.generate([{"prompt_token_ids": text}], parameters, use_tqdm=False)
        rows = output.prompt_logprobs[1:]
        table = np.full((len(rows), max(map(max, rows)) + 1), -np.inf, np.float32)
        for position, row in enumerate(rows):
            for token, entry in row.items():
                table[position, token] = entry.logprob
        found.append(table)
    return found


def mean_kl(reference: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Mean over positions of KL(reference || other) in nats."""
    total = positions = 0.0
    for p, q in zip(reference, other, strict=True):
        known = np.isfinite(p)
        difference = np.where(known, p - np.where(known, q, 0), 0)
        total += float((np.exp(p.astype(np.float64)) * difference).sum())
        positions += len(p)
    return total / positions


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    found = logprobs(job["engine"], job["texts"])
    loaded = {name: f"glm_exl3.quant.{name}" in sys.modules for name in ("recode", "recode_cache")}
    tables = {str(number): table for number, table in enumerate(found)}
    np.savez(sys.argv[2], loaded=json.dumps(loaded), **tables)


if __name__ == "__main__":
    main()
