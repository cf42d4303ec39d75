"""Lookup beside DFlash2, and the draft length that adapts: what they give on the miniature.

    cd bench && python -m e2e.hybrid RESULT.json [--tokens 80] [--graphs] [--real] [--modules]

Loads the miniature with its drafter in this process and lets it write after prompts of three kinds:
an edit of code, an edit of JSON (a text, then the beginning of its copy with one change) and prose,
greedy, and prose sampled at temperature 1. Everything is computed from traces of those answers
(`e2e.traces`); `--real` also lets the engine itself draft both ways and counts. The curve of step
times is the one of `GLM_EXL3_STEP_MS`. `--graphs` is for a GPU; `--modules` takes the training
modules in place of the engine (`e2e.nano_traces`).
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from e2e import traces as tr

NANO = Path(__file__).parents[1] / "nano" / "model"
MASK_TOKEN = 1889
LENGTHS = (2, 4, 7)
LEAST = (3, 4, 5, 6, 8, 10, 12)
NEVER = 64
EDITS_GAIN, PROSE_LOSS = 0.25, -0.02
MODULES = ("json.decoder", "textwrap", "shlex", "bisect", "heapq", "string", "gzip", "fractions")
PROSE = ("csv", "logging", "argparse", "sqlite3", "zipfile", "decimal", "random", "socket",
         "subprocess", "threading", "tempfile", "statistics")  # fmt: skip
KINDS = ("code edit", "JSON edit", "prose")


def code_edits(rows: int = 8, characters: int = 500) -> list[str]:
    """A piece of a standard module, and the first third of it again with one name changed."""
    made = []
    for name in MODULES[:rows]:
        source = inspect.getsource(import_module(name))
        start = source.index("def ")
        piece = source[start : start + characters]
        argument = piece.split("(", 1)[1].split(",")[0].split(")")[0].split("=")[0].strip()
        copy = piece[: characters // 3]
        made.append(f"{piece}\n\n\n{copy.replace(argument, argument + '2', 1)}")
    return made


def json_edits(rows: int = 8) -> list[str]:
    """Records, and the beginning of the same records with one value changed."""
    made, dice = [], random.Random(5)
    for _ in range(rows):
        records = [
            {"name": dice.choice(MODULES), "version": f"{dice.randrange(9)}.{dice.randrange(9)}",
             "size": dice.randrange(100, 999), "enabled": dice.random() < 0.5}
            for _ in range(5)
        ]  # fmt: skip
        text = json.dumps(records, indent=2)
        copy = text.replace(f'"size": {records[0]["size"]}', '"size": 12', 1)
        made.append(f"{text}\n\n{copy[: len(copy) // 3]}")
    return made


def prose(rows: int = 12, characters: int = 220) -> list[str]:
    """Beginnings of the documentation of standard modules."""
    return [(inspect.getdoc(import_module(name)) or "")[:characters] for name in PROSE[:rows]]


class Miniature:
    """The trained miniature in this process, drafting with lookup where `least` allows."""

    def __init__(self, *, graphs: bool) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "GLM_EXL3_HYBRID_DRAFT": "1"}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from tokenizers import Tokenizer
        from vllm import LLM

        schedule = [[i, i, k] for i, k in enumerate(reversed(LENGTHS), start=1)]
        self.llm = LLM(
            model=str(NANO / "full-4bpw"), enforce_eager=not graphs, seed=0, max_model_len=1024,
            language_model_only=True, max_num_seqs=12, enable_prefix_caching=False,
            disable_log_stats=False, scheduler_cls="glm_exl3.spec.adaptive.AdaptiveScheduler",
            speculative_config={
                "method": "dflash", "model": str(NANO / "drafter"),
                "num_speculative_tokens": max(LENGTHS),
                "num_speculative_tokens_per_batch_size": schedule,
            },
        )  # fmt: skip
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.tokenizer = Tokenizer.from_file(str(NANO / "full-4bpw" / "tokenizer.json"))

    def write(self, texts: Sequence[str], tokens: int, temperature: float) -> list[Any]:
        from vllm import SamplingParams

        inputs = [{"prompt_token_ids": self.tokenizer.encode(text).ids} for text in texts]
        how = SamplingParams(
            max_tokens=tokens, temperature=temperature, ignore_eos=True, seed=1, detokenize=False
        )
        outputs: list[Any] = self.llm.generate(inputs, how, use_tqdm=False)
        return outputs

    def record(self, texts: Sequence[str], tokens: int, temperature: float) -> list[tr.Trace]:
        self.scheduler.retune({"lengths": [min(LENGTHS)]})
        with tr.Recorder(self.runner, MASK_TOKEN) as recorder:
            return recorder.traces(self.write(texts, tokens, temperature))

    def drafted(self, texts: Sequence[str], tokens: int, least: int) -> dict[str, Any]:
        """Accepted drafts per step of the engine itself, and the texts it wrote."""
        self.scheduler.retune({"mode": "off"})
        self.runner.speculator.lookup.require(least)
        before = self.counts()
        outputs = self.write(texts, tokens, 0.0)
        steps, accepted = (b - a for a, b in zip(before, self.counts(), strict=True))
        lines = [list(output.outputs[0].token_ids) for output in outputs]
        return {"steps": steps, "accepted_per_step": accepted / steps, "lines": lines}

    def counts(self) -> tuple[int, int]:
        """Verify steps of all requests so far, and accepted drafts."""
        found = {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics()}
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        steps, accepted = (int(found.get(name, 0)) for name in names)
        return steps, accepted


def hybrid_row(kind: str, traces: Sequence[tr.Trace]) -> dict[str, Any]:
    """Accepted drafts per step of DFlash2 alone and with lookup, by the length of a match."""
    alone = tr.accepted_per_step(traces, tr.drafter, 7)
    row = {"kind": kind, "texts": len(traces), "dflash2": alone}
    for least in LEAST:
        row[f"lookup from {least}"] = tr.accepted_per_step(traces, tr.hybrid(least), 7)
        row[f"15 from {least}"] = tr.accepted_per_step(traces, tr.hybrid(least), 15)
    return row


def adaptive_row(kind: str, traces: Sequence[tr.Trace]) -> dict[str, Any]:
    """Tokens a second of fixed 7 and of the adaptive length, one request at a time."""
    from glm_exl3 import envs

    curve = envs.STEP_MS.read()
    fixed = tr.tokens_per_ms(traces, tr.drafter, curve, LENGTHS, adapt=False)
    ema = tr.tokens_per_ms(traces, tr.drafter, curve, LENGTHS, adapt=True)
    return {
        "kind": kind, "accepted_per_step": tr.accepted_per_step(traces, tr.drafter, 7),
        "fixed_tokens_per_s": 1000 * fixed, "ema_tokens_per_s": 1000 * ema,
        "gain": ema / fixed - 1,
    }  # fmt: skip


def measure(out: Path, tokens: int, *, graphs: bool, real: bool, modules: bool) -> dict[str, Any]:
    from e2e.nano_traces import Modules

    folder, drafter = NANO / "full-4bpw", NANO / "drafter"
    model: Any = Modules(folder, drafter) if modules else Miniature(graphs=graphs)
    texts = dict(zip(KINDS, (code_edits(), json_edits(), prose()), strict=True))
    recorded: dict[str, list[tr.Trace]] = {}
    for kind, temperature in (*((kind, 0.0) for kind in KINDS), ("prose", 1.0)):
        name = f"{kind}, T = 1" if temperature else kind
        recorded[name] = model.record(texts[kind], tokens, temperature)
        print(f"{name}: {len(recorded[name])} texts written", flush=True)
    result: dict[str, Any] = {
        "tokens": tokens,
        "hybrid": [hybrid_row(kind, found) for kind, found in recorded.items()],
        "adaptive": [adaptive_row(kind, found) for kind, found in recorded.items()],
        "traces": {kind: [vars(trace) for trace in found] for kind, found in recorded.items()},
    }
    out.write_text(json.dumps(result) + "\n")
    for kind, prompts in texts.items() if real else ():
        row = {"kind": kind, "dflash2": model.drafted(prompts, tokens, NEVER),
               "hybrid": model.drafted(prompts, tokens, model_least())}  # fmt: skip
        result.setdefault("engine", []).append(row)
        out.write_text(json.dumps(result) + "\n")
        print(f"{kind}: the engine drafted", flush=True)
    return result


def verdict(result: dict[str, Any]) -> tuple[bool, str]:
    """Whether edits gain and prose does not lose what the targets say, and a line about it."""
    least = f"lookup from {model_least()}"
    gains = {row["kind"]: row[least] / row["dflash2"] - 1 for row in result["hybrid"]}
    if "engine" in result:
        gains |= {
            f"{row['kind']}, engine": row["hybrid"]["accepted_per_step"]
            / row["dflash2"]["accepted_per_step"] - 1
            for row in result["engine"]
        }  # fmt: skip
    edits = min(gain for kind, gain in gains.items() if "edit" in kind)
    prose_ = min(gain for kind, gain in gains.items() if "edit" not in kind)
    good = edits >= EDITS_GAIN and prose_ >= PROSE_LOSS
    return good, (
        f"hybrid: {'ok' if good else 'MISSED'}, edits {edits:+.1%} or more (target "
        f"{EDITS_GAIN:+.0%}), prose {prose_:+.1%} or more (target {PROSE_LOSS:+.0%})"
    )


def model_least() -> int:
    from glm_exl3 import envs

    return int(envs.HYBRID_MATCH.read())


def show(result: dict[str, Any]) -> None:
    least = f"lookup from {model_least()}"
    print("accepted drafts per step       DFlash2   hybrid")
    for row in result["hybrid"]:
        gain = row[least] / row["dflash2"] - 1
        print(f"{row['kind']:30} {row['dflash2']:7.3f} {row[least]:8.3f}  {gain:+7.1%}")
    print("tokens/s by the curve          fixed 7      ema")
    for row in result["adaptive"]:
        fixed, ema = row["fixed_tokens_per_s"], row["ema_tokens_per_s"]
        print(f"{row['kind']:30} {fixed:7.1f} {ema:8.1f}  {row['gain']:+7.1%}")
    for row in result.get("engine", []):
        alone, both = (row[name]["accepted_per_step"] for name in ("dflash2", "hybrid"))
        print(f"engine, {row['kind']:22} {alone:7.3f} {both:8.3f}  {both / alone - 1:+7.1%}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m e2e.hybrid")
    made.add_argument("result", type=Path)
    made.add_argument("--tokens", type=int, default=80)
    made.add_argument("--graphs", action="store_true")
    made.add_argument("--real", action="store_true")
    made.add_argument("--modules", action="store_true")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, measure, write and show; 1 when a target was missed."""
    options = parser().parse_args(arguments)
    if options.modules and (options.real or options.graphs):
        parser().error("--modules starts no engine: leave out --real and --graphs")
    begin = time.monotonic()
    result = measure(
        options.result, options.tokens,
        graphs=options.graphs, real=options.real, modules=options.modules,
    )  # fmt: skip
    result["by"] = "training modules" if options.modules else "engine"
    result["seconds"] = time.monotonic() - begin
    options.result.write_text(json.dumps(result) + "\n")
    show(result)
    good, line = verdict(result)
    print(line)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
