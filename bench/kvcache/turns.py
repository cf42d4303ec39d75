"""What the second turn of a chat of 7,760 tokens reuses, with DFlash2 on, and that it is right.

    python -m kvcache.turns WORK --out bench/expected/h200-1x/kv.json [--memory-gib 8]

One engine in this machine serves the trained miniature `full-4bpw` and its drafter, given a window
of 2,048 tokens as the published one has, with blocks of 5,120 tokens as at TP 2 on SM120 and a
grain of 256. The answer to the second turn is compared with a cold one's (`prefix_job`, part
`turns`). Puts `prefix_reuse_second_turn` into the file and leaves its other keys; exit status 1
below 95 % or if the answer differs beyond a near-tie.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e.draft_rows import shared_memory
from kvcache.sequences import run_job, slide

MODEL = Path(__file__).parents[1] / "nano" / "model"
TARGET = 0.95
WINDOW, GRAIN, BLOCK = 2048, 256, 5120


def job(drafter: Path, length: int, memory_gib: float = 0.0) -> dict[str, Any]:
    """What `prefix_job` is asked for; `memory_gib` of KV cache where the GPU is shared."""
    engine = {
        "model": str(MODEL / "full-4bpw"),
        "max_model_len": 8192,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 2048,
        "block_size": BLOCK,
        "prefix_match_unit": GRAIN,
        "speculative_config": {
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": 7,
        },
        **shared_memory(memory_gib),
    }
    return {"engine": engine, "turns": {"length": length, "answer": 24, "question": 60}}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m kvcache.turns")
    made.add_argument("work", type=Path)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--length", type=int, default=7760)
    made.add_argument("--memory-gib", type=float, default=0.0, help="of KV cache; 0: vLLM's")
    made.add_argument("--machine", default="")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    asked.work.mkdir(parents=True, exist_ok=True)
    drafter = asked.work / "sliding"
    if not drafter.exists():
        slide(MODEL / "drafter", drafter, WINDOW)
    found = run_job(asked.work, "turns", job(drafter, asked.length, asked.memory_gib))
    turns = found["turns"]
    record = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    record |= {
        "prefix_reuse_second_turn": round(turns["reused"], 4),
        "second_turn": turns | {"date": time.strftime("%Y-%m-%d")},
    }
    record |= {"machine": asked.machine} if asked.machine else {}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(record, indent=1) + "\n")
    broken = turns["comparison"]["broken"]
    passed = turns["reused"] >= TARGET and not broken
    print(f"kvcache.turns: {turns['reused']:.1%} reused, {broken or 'answer equals a cold one'}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
