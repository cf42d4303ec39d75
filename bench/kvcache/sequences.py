"""200 random request sequences on the CPU engine, each answer compared with a cold run.

    python -m kvcache.sequences WORK --out RECORD.json [--pieces 20] [--each 10] [--seconds 400]

A piece is one engine process over `each` sequences (`tests/engine/prefix_job.py`, its number is the
seed): requests that share prefixes, overlap, are aborted, resent or keep themselves out of the
cache, in a pool so small that it evicts and preempts, with DFlash2 drafts under a sliding window,
prefixes parked in host memory and images off. The record is written after every piece; a run that
was stopped goes on behind the last one. It ends with 1 if an answer differs beyond a near-tie.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from e2e import child

ENGINE_TESTS = Path(__file__).parents[2] / "tests" / "engine"
DRAFTS, WINDOW, UNIT = 3, 256, 64
POOL_BLOCKS, PARKED_BYTES = 90, 100 * 2**20
SUMMED = ("sequences", "answers", "equal_to_the_bit", "positions", "ties")


def slide(drafter: Path, out: Path, window: int = WINDOW) -> Path:
    """The same drafter with a sliding window in all layers."""
    shutil.copytree(drafter, out)
    config = json.loads((out / "config.json").read_text())
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": window}
    (out / "config.json").write_text(json.dumps(config))
    return out


def make_models(root: Path) -> tuple[Path, Path]:
    """A tiny BF16 target and its drafter with a window; kept if they are there."""
    target, drafter, sliding = root / "target", root / "drafter", root / "sliding"
    if not sliding.exists():
        command = [sys.executable, "-m", "glm_exl3.ref.tiny", "--family", "bf16"]
        command += ["--twin-of", "full", "--out", str(target), "--drafter", str(drafter)]
        subprocess.run(command, check=True)
        slide(drafter, sliding)
    return target, sliding


def engine(target: Path, drafter: Path) -> dict[str, Any]:
    """Arguments of an engine with fine hits, a small pool, drafts and parking."""
    return {
        "model": str(target),
        "prefix_match_unit": UNIT,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": POOL_BLOCKS,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": PARKED_BYTES,
                "spec_name": "HostParkingSpec",
                "spec_module_path": "glm_exl3.kvcache.parking",
            },
        },
        "speculative_config": {
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": DRAFTS,
        },
    }


def run_job(work: Path, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """One process of `prefix_job`; raises SystemExit with its last words if it fails."""
    paths = [str(ENGINE_TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    words = (str(ENGINE_TESTS / "prefix_job.py"), "{job}", "{out}")
    found = child.run(words, job, work / f"{name}.json", None, environment)
    if "error" in found:
        raise SystemExit(found["error"])
    return found


def run_piece(work: Path, number: int, each: int, longest: int) -> dict[str, Any]:
    """One engine over `each` sequences; what they gave, with the engine's counters."""
    asked = {"count": each, "longest": longest, "seed": number, "together": each}
    job = {"engine": engine(*make_models(work)), "sequences": asked}
    found = run_job(work, f"piece-{number}", job)
    counters = found["counters"]
    return found["sequences"] | {
        "from_host": counters.get("vllm:external_prefix_cache_hits", 0),
        "preemptions": counters.get("vllm:num_preemptions", 0),
        "drafted": counters.get("vllm:spec_decode_num_draft_tokens", 0),
    }


def summed(pieces: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Totals over pieces, and every difference beyond the rule under `broken`."""
    totals: Counter[str] = Counter()
    broken: list[str] = []
    for piece in pieces:
        totals.update({key: piece[key] for key in (*SUMMED, "from_host", "preemptions", "drafted")})
        totals.update({k: v for k, v in piece["counts"].items() if isinstance(v, int)})
        broken += piece["broken"]
    return {**totals, "broken": broken}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvcache.sequences", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pieces", type=int, default=20)
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=400, help="start no piece after these")
    parser.add_argument("--machine", default="")
    asked = parser.parse_args(arguments)
    asked.work.mkdir(parents=True, exist_ok=True)
    record = json.loads(asked.out.read_text()) if asked.out.exists() else {"pieces": {}}
    shape = {"each": asked.each, "longest": asked.longest}
    if record.setdefault("shape", shape) != shape:
        parser.error(f"{asked.out} holds pieces of {record['shape']}")
    begin = time.monotonic()
    for number in range(1, asked.pieces + 1):
        if str(number) in record["pieces"]:
            continue
        if time.monotonic() - begin > asked.seconds:
            break
        record["pieces"][str(number)] = run_piece(asked.work, number, asked.each, asked.longest)
        record |= {"machine": asked.machine, "date": time.strftime("%Y-%m-%d")}
        record["total"] = summed(record["pieces"].values())
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    total = record.get("total", {"sequences": 0, "broken": []})
    verdict = "differ" if total["broken"] else "equal cold ones"
    print(
        f"{total['sequences']} of {asked.pieces * asked.each} sequences: answers {verdict};", total
    )
    return int(bool(total["broken"]))


if __name__ == "__main__":
    sys.exit(main())
