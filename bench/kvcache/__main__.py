"""`python -m kvcache`: the figures of the KV cache, as a table and as JSON.

    python -m kvcache --url http://HEAD:8888/v1 --out bench/expected/h200-1x/kv.json
    python -m kvcache --out FILE        # arithmetic only, without a server

`fixed_cost_ratio` is arithmetic over vLLM's own planner (`kvcache.pool`): what a request pins
before its first token, ours against unmodified vLLM. `prefix_reuse_second_turn` is measured: a
chat of 7,760 tokens, then a second turn, and the share of the second prompt that the server reports
as cached. The file names the machine, the settings and the protocol.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvcache.pool import Case, Pool, plan

FIRST_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 7760, 60, 64
UNMODIFIED = Case()
OURS = replace(UNMODIFIED, row_bytes=528, state_bytes=2, draft_value_bytes=1)
WORDS = (2000, 20000)


def fixed_bytes(case: Case, made: Pool) -> int:
    """Bytes of a request that do not depend on its length, per rank."""
    grows = -(-case.max_model_len // made.block_tokens)
    return (made.request_blocks - grows) * made.block_bytes


def fixed_cost() -> dict[str, Any]:
    """Both sides and their ratio at TP2 with seven drafts."""
    before, after = plan(UNMODIFIED), plan(OURS)
    sides = {"unmodified": (UNMODIFIED, before), "ours": (OURS, after)}
    said = {
        name: asdict(made) | {"fixed_bytes": fixed_bytes(case, made), "settings": asdict(case)}
        for name, (case, made) in sides.items()
    }
    ratio = said["ours"]["fixed_bytes"] / said["unmodified"]["fixed_bytes"]
    return {"fixed_cost_ratio": round(ratio, 4), "fixed_cost": said}


def complete(url: str, model: str, prompt: list[int], key: str) -> dict[str, Any]:
    """One greedy completion of token ids; the server's own JSON with `seconds`."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(  # noqa: S310 (the user's server)
        f"{url}/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as reply:  # noqa: S310 (the user's server)
        found: dict[str, Any] = json.load(reply)
    return found | {"seconds": round(time.monotonic() - began, 3)}


def second_turn(url: str, model: str, key: str, seed: int) -> dict[str, Any]:
    """Reuse of a second turn; needs `--enable-prompt-tokens-details` on the server."""
    generator = random.Random(seed)
    first = [generator.randrange(*WORDS) for _ in range(FIRST_TOKENS)]
    one = complete(url, model, first, key)
    answer = one["choices"][0].get("token_ids") or []
    second = [*first, *answer, *(generator.randrange(*WORDS) for _ in range(QUESTION_TOKENS))]
    two = complete(url, model, second, key)
    details = two["usage"].get("prompt_tokens_details")
    if details is None:
        sys.exit("the server does not report cached tokens: start it with "
                 "EXTRA_ARGS=--enable-prompt-tokens-details")  # fmt: skip
    cached = details["cached_tokens"]
    return {
        "prefix_reuse_second_turn": round(cached / len(second), 4),
        "second_turn": {
            "first_tokens": len(first),
            "second_tokens": len(second),
            "cached_tokens": cached,
            "first_seconds": one["seconds"],
            "second_seconds": two["seconds"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvcache", description=__doc__)
    parser.add_argument("--url", default="", help="OpenAI endpoint of a running server")
    parser.add_argument("--model", default="GLM-5.3-Flash-EXL3")
    parser.add_argument("--key", default="none", help="API key of the server")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--machine", default="", help="what the numbers were measured on")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    machine = asked.machine or f"{platform.machine()}, arithmetic only"
    found: dict[str, Any] = {"machine": machine, "date": time.strftime("%Y-%m-%d")}
    found |= fixed_cost()
    if asked.url:
        found |= second_turn(asked.url.rstrip("/"), asked.model, asked.key, asked.seed)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    for name in ("fixed_cost_ratio", "prefix_reuse_second_turn"):
        print(f"{name:28}{found.get(name, 'not measured')}")


if __name__ == "__main__":
    main()
