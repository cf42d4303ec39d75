"""The same text from vLLM's attention and from ours, with every row layout.

    python -m e2e.attention_text WORK --out RESULT.json [--models nano,tiny] [--seconds 240]

One engine process per configuration, vLLM's path with bf16 rows first, then Triton (attention and
indexer) with bf16, fp8 and int8 rows. Each answers the same prompts greedily, among them prompts
longer than the indexer chooses from (`index_topk` 512), and scores texts of that length. bf16 rows
must give vLLM's text by the rule of `tests/engine/equivalence.py`; every layout must stay within
its mean KL divergence (nats per token). Models: the miniature `full-4bpw`, and the tiny `full`
checkpoint with random weights. The result is written after every configuration, and nothing starts
behind `--seconds`; exit status 1 if something differs or is missing. With `--at-once` engines share
the GPU, each with `--memory-gib` of KV cache: the models side by side, and our rows of each. On a
CPU both values of GLM_EXL3_ATTENTION are the engine's own path, so only layouts are compared there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from e2e.child import run as run_alone
from e2e.draft_rows import shared_memory
from e2e.gpu_text import tiny_folders

ROOT = Path(__file__).parents[2]
ENGINE_TESTS = ROOT / "tests" / "engine"
NANO = ROOT / "bench" / "nano" / "model" / "full-4bpw"
PANEL = ROOT / "tests" / "bench" / "nano_panel.json"
BASE = ("vllm", "bf16")
OURS = (("triton", "bf16"), ("triton", "fp8"), ("triton", "int8"))
LIMITS = {"bf16": 1e-3, "fp8": 1e-2, "int8": 1e-2}
WIDE_SHARE = 0.005


def asked(model: str, short: int, long: int) -> dict[str, list[list[int]]]:
    """`prompts` to go on with, short ones and ones beyond `index_topk`, and `texts` to score."""
    from kv.divergence import texts

    panel = json.loads(PANEL.read_text())
    longer = texts(2 * long, 900 if model == "nano" else 700)
    prompts = [prompt[:96] for prompt in panel["prompts"][:short]] + longer[:long]
    return {"prompts": prompts, "texts": longer[long : 2 * long]}


def child(job: Mapping[str, Any], out: Path) -> None:
    """One engine in this process: lines or their comparison, and log-probabilities of the texts."""
    import torch

    from equivalence import Line, compare
    from in_process import Engine
    from kv.divergence import keep_rows, scored

    rows = keep_rows()
    engine = Engine(job["engine"])
    rows.clear()
    lengths = [job["tokens"]] * len(job["prompts"])
    result: dict[str, Any] = {}
    if "reference" in job:
        lines = [Line(**{k: tuple(v) for k, v in line.items()}) for line in job["reference"]]
        found = compare(job["prompts"], lines, engine, WIDE_SHARE)
        result["comparison"] = found.as_json()
    else:
        result["lines"] = [vars(line) for line in engine(job["prompts"], lengths)]
    torch.save(scored(engine.llm, rows, job["texts"]), out.with_suffix(".pt"))
    result["device"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    out.write_text(json.dumps(result))


def run(job: dict[str, Any], attention: str, out: Path, limit_s: float) -> dict[str, Any]:
    """A child process; its result, or `error` with the end of its output."""
    paths = [ENGINE_TESTS, ROOT / "overlay", ROOT / "bench", os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(map(str, filter(None, paths)))}
    env["GLM_EXL3_ATTENTION"] = attention
    words = ("-m", "e2e.attention_text", "{job}", "--child", "--out", "{out}")
    return run_alone(words, job, out, limit_s, env)


def row_of(found: Mapping[str, Any], layout: str, kl: Mapping[str, float]) -> dict[str, Any]:
    """Figures of one configuration; `equal` is asked of bf16 rows only."""
    comparison = found["comparison"]
    text = {key: comparison[key] for key in ("ties", "median_difference")}
    text |= {
        "text_positions": comparison["positions"],
        "wide": len(comparison["wide"]),
        "broken": comparison["broken"][:3],
    }
    equal = not comparison["broken"]
    within = kl["mean_kl"] <= LIMITS[layout]
    passed = within and (equal or layout != "bf16")
    return {"text_equal": equal, **text, **kl, "limit": LIMITS[layout], "passed": passed}


class Model:
    """One model's configurations, each an engine, and what they gave."""

    def __init__(
        self, name: str, folder: Path, options: argparse.Namespace, save: Any, deadline: float
    ) -> None:
        self.name, self.folder, self.options = name, folder, options
        self.save, self.deadline = save, deadline
        self.inputs = asked(name, options.short, options.long)
        self.job: dict[str, Any] = {"tokens": options.tokens, **self.inputs}
        self.base: list[Any] = []

    def row(self, attention: str, layout: str) -> dict[str, Any]:
        """Figures of one configuration, or `error`."""
        import torch

        from glm_exl3.format.kv import VLLM_NAMES
        from kv.divergence import compare

        left = self.deadline - time.monotonic()
        if left < self.options.least:
            return {"error": "no time was left"}
        engine: dict[str, Any] = {"model": str(self.folder), "kv_cache_dtype": VLLM_NAMES[layout]}
        engine |= {"enable_prefix_caching": False, "max_num_batched_tokens": 512}
        engine |= shared_memory(self.options.memory_gib)
        out = self.options.work / f"{self.name}-{attention}-{layout}.json"
        found = run(self.job | {"engine": engine}, attention, out, left)
        if "error" in found:
            return found
        rows = torch.load(out.with_suffix(".pt"))
        if (attention, layout) == BASE:
            self.base, self.job["reference"] = rows, found["lines"]
            return {"device": found["device"]}
        return row_of(found, layout, compare(self.base, rows, self.inputs["texts"]))

    def told(self, pair: tuple[str, str]) -> None:
        """One configuration, saved and said."""
        began, key = time.monotonic(), "-".join(pair)
        row = self.row(*pair) | {"seconds": round(time.monotonic() - began, 1)}
        self.save(self.name, key, row)
        said = {k: v for k, v in row.items() if k != "broken"}
        print(self.name, key, json.dumps(said)[:500], flush=True)

    def all(self) -> None:
        """vLLM's rows first, since the others are compared with them; without them none runs."""
        self.told(BASE)
        if self.base:
            with ThreadPoolExecutor(min(len(OURS), self.options.at_once)) as pool:
                list(pool.map(self.told, OURS))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.attention_text")
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=lambda text: text.split(","), default=["nano", "tiny"])
    parser.add_argument("--short", type=int, default=12, help="prompts of at most 96 tokens")
    parser.add_argument("--long", type=int, default=2, help="prompts and texts beyond index_topk")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--least", type=float, default=20, help="seconds that an engine needs")
    parser.add_argument("--at-once", type=int, default=1, help="engines that share the GPU")
    parser.add_argument("--memory-gib", type=float, default=0.0, help="of KV cache; 0: vLLM's")
    parser.add_argument("--tiny", type=Path, help="where the tiny checkpoint is or gets; WORK")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(json.loads(options.work.read_text()), options.out)
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    record: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "models": {}}
    lock = threading.Lock()

    def save(name: str, key: str, row: dict[str, Any]) -> None:
        with lock:
            record["models"][name][key] = row
            options.out.write_text(json.dumps(record, indent=1) + "\n")

    models = []
    for name in options.models:
        record["models"][name] = {}
        folder = NANO if name == "nano" else tiny_folders(options.tiny or options.work)[0]
        models.append(Model(name, folder, options, save, deadline))
    with ThreadPoolExecutor(min(len(models), options.at_once)) as pool:
        list(pool.map(Model.all, models))
    ours = [f"{attention}-{layout}" for attention, layout in OURS]
    passed = [
        rows.get(key, {}).get("passed", False) for rows in record["models"].values() for key in ours
    ]
    record["attention_text_passed"] = all(passed)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"attention_text: {sum(passed)} of {len(passed)} configurations passed")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
