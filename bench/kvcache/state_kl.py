"""What a KDA state in bfloat16 costs in accuracy: KL against float32, decoding token by token.

    python -m kvcache.state_kl --model FOLDER --out FILE [--tokens 96]

Two engines, one per type of state, answer the same prompts greedily, and every step gives all
log-probabilities. Where the second chooses another token, the first one's is forced and the
comparison goes on behind it; a forced prefix is prefilled, so its state was rounded once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = (
    "The gzip module provides a simple interface to compress and decompress files.",
    'def read_lines(path):\n    """Return the lines of a file."""\n',
    "Exceptions are raised when",
    "class Stack:\n    def __init__(self):\n",
    "To open a socket and listen for connections, call",
    "A list comprehension consists of brackets containing an expression followed by",
)
VOCABULARY = 1920


def run(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Steps of each prompt: token and all log-probabilities; `forced` holds the tokens to follow.

    Without `forced`, the engine's own choices; with it, comparison rounds until every prompt ends.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"], enforce_eager=True, seed=0, max_model_len=2048,
        language_model_only=True, enable_prefix_caching=False, max_logprobs=VOCABULARY,
        mamba_ssm_cache_dtype=job["state"],
    )  # fmt: skip
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    forced = job.get("forced") or [[] for _ in prompts]
    steps: list[list[dict[str, Any]]] = [[] for _ in prompts]
    pending = list(range(len(prompts)))
    while pending:
        inputs = [{"prompt_token_ids": prompts[i] + forced[i][: len(steps[i])]} for i in pending]
        parameters = [
            SamplingParams(
                max_tokens=job["tokens"] - len(steps[i]), temperature=0, ignore_eos=True,
                logprobs=VOCABULARY,
            )
            for i in pending
        ]  # fmt: skip
        outputs = llm.generate(inputs, parameters, use_tqdm=False)
        for index, output in zip(list(pending), outputs, strict=True):
            answer = output.outputs[0]
            for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
                values = [-math.inf] * VOCABULARY
                for candidate, entry in entries.items():
                    values[candidate] = entry.logprob
                place = len(steps[index])
                steps[index].append({"token": token, "logprobs": values})
                if forced[index] and token != forced[index][place]:
                    break
            if len(steps[index]) >= job["tokens"]:
                pending.remove(index)
    return steps


def compare(reference: list[Any], other: list[Any]) -> dict[str, Any]:
    """KL in nats per position, and how often the first choice differs."""
    divergences, flips = [], 0
    for first, second in zip(reference, other, strict=True):
        for one, two in zip(first, second, strict=True):
            pairs = zip(one["logprobs"], two["logprobs"], strict=True)
            divergences.append(
                sum(math.exp(p) * (p - q) for p, q in pairs if p > -60 and q > -math.inf)  # noqa: PLR2004
            )
            flips += one["token"] != two["token"]
    divergences.sort()
    return {
        "positions": len(divergences),
        "mean_kl": sum(divergences) / len(divergences),
        "median_kl": divergences[len(divergences) // 2],
        "p99_kl": divergences[int(0.99 * (len(divergences) - 1))],
        "max_kl": divergences[-1],
        "other_first_choice": flips,
    }


def child(job: dict[str, Any], folder: Path) -> list[Any]:
    path, out = folder / "job.json", folder / f"{job['state']}.json"
    path.write_text(json.dumps(job))
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "kvcache.state_kl", "--child", str(path), "--out", str(out)]
    subprocess.run(command, check=True, env=environ)
    found: list[Any] = json.loads(out.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvcache.state_kl", description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--machine", default="")
    parser.add_argument("--child", type=Path)
    asked = parser.parse_args()
    if asked.child:
        asked.out.write_text(json.dumps(run(json.loads(asked.child.read_text()))))
        return
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        job = {"model": asked.model, "tokens": asked.tokens}
        reference = child(job | {"state": "float32"}, Path(name))
        forced = [[step["token"] for step in steps] for steps in reference]
        other = child(job | {"state": "bfloat16", "forced": forced}, Path(name))
    found = compare(reference, other) | {
        "machine": asked.machine, "date": time.strftime("%Y-%m-%d"), "model": asked.model,
        "prompts": len(PROMPTS), "tokens": asked.tokens,
    }  # fmt: skip
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
