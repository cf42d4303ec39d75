"""What a row layout changes in a model's answers, measured with the CPU engine.

    python -m kv.divergence MODEL RESULT.json [--layouts fp8 int8] [--tokens 1900] [--texts 2]

Each layout runs in an engine process of its own over the same texts, longer than what the indexer
chooses, so that selection is part of it. The result holds the mean KL divergence (nats per token)
of each layout's distributions from those of bf16 rows, the share of positions whose most likely
token differs, and the change of the mean loss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm_exl3.format.kv import LAYOUTS, VLLM_NAMES

PANEL = Path(__file__).parents[2] / "tests" / "bench" / "nano_panel.json"
BASE = "bf16"


def texts(count: int, tokens: int) -> list[list[int]]:
    """`count` texts of `tokens` token ids, made of the held-out panel's."""
    pieces = json.loads(PANEL.read_text())["texts"]
    stream = [token for piece in pieces for token in piece]
    stream *= -(-count * tokens // len(stream))
    return [stream[start : start + tokens] for start in range(0, count * tokens, tokens)]


def keep_rows() -> list[Tensor]:
    """A list to which every call of the model from now on adds its log-probabilities."""
    from glm_exl3.models.glm5next import Exl3Glm5NextForConditionalGeneration as Model

    rows: list[Tensor] = []
    plain = Model.compute_logits

    def keeping(self: Any, *arguments: Any, **named: Any) -> Any:
        logits = plain(self, *arguments, **named)
        rows.append(torch.log_softmax(logits.float(), dim=-1))
        return logits

    Model.compute_logits = keeping
    return rows


def scored(llm: Any, rows: list[Tensor], asked: list[list[int]]) -> list[Tensor]:
    """`[len(text) - 1, vocabulary]` on the CPU per text, from an engine in this process."""
    from vllm import SamplingParams

    kept = []
    for text in asked:
        rows.clear()
        parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        llm.generate([{"prompt_token_ids": text}], parameters, use_tqdm=False)
        found = torch.cat([part for part in rows if part.shape[0] > 1])
        kept.append(found[: len(text) - 1].cpu())
    rows.clear()
    return kept


def capture(model: str, layout: str, asked: list[list[int]], out: Path) -> None:
    """Run one engine in this process and save the log-probabilities of every position."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING")
    from vllm import LLM

    rows = keep_rows()
    llm = LLM(
        model=model,
        kv_cache_dtype=VLLM_NAMES[layout],
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=512,
        limit_mm_per_prompt={"image": 0, "video": 0},
        enable_prefix_caching=False,
    )
    torch.save(scored(llm, rows, asked), out)


def compare(base: list[Tensor], other: list[Tensor], asked: list[list[int]]) -> dict[str, float]:
    """Figures of one layout against bf16 rows."""
    divergences, flips, losses = [], [], []
    for p, q, text in zip(base, other, asked, strict=True):
        if p.shape != q.shape:
            raise SystemExit(f"{tuple(q.shape)} log-probabilities instead of {tuple(p.shape)}")
        divergences.append((p.exp() * (p - q)).sum(-1))
        flips.append((p.argmax(-1) != q.argmax(-1)).float())
        chosen = torch.tensor(text[1 : p.shape[0] + 1])[:, None]
        losses.append((p.gather(1, chosen) - q.gather(1, chosen))[:, 0])
    every = torch.cat(divergences)
    return {
        "mean_kl": float(every.mean()),
        "largest_kl": float(every.max()),
        "other_best": float(torch.cat(flips).mean()),
        "loss_change": float(torch.cat(losses).mean()),
        "positions": float(every.numel()),
    }


def run(model: str, layout: str, given: argparse.Namespace, out: Path) -> list[Tensor]:
    """One child process."""
    command = [sys.executable, "-m", "kv.divergence", model, str(out), "--child", layout]
    command += ["--tokens", str(given.tokens), "--texts", str(given.texts)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(done.stdout.decode()[-4000:])
    kept: list[Tensor] = torch.load(out)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare row layouts by a model's answers.")
    parser.add_argument("model")
    parser.add_argument("result", type=Path)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=["fp8", "int8"])
    parser.add_argument("--tokens", type=int, default=1900)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--child", choices=list(LAYOUTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    asked = texts(given.texts, given.tokens)
    if given.child:
        capture(given.model, given.child, asked, given.result)
        return
    with tempfile.TemporaryDirectory() as folder:
        base = run(given.model, BASE, given, Path(folder) / "base.pt")
        found = {
            layout: compare(base, run(given.model, layout, given, Path(folder) / layout), asked)
            for layout in given.layouts
        }
    record = {"model": Path(given.model).name, "tokens": given.tokens, "layouts": found}
    given.result.write_text(json.dumps(record, indent=1) + "\n")
    for layout, row in found.items():
        print(layout, " ".join(f"{name}={value:.6f}" for name, value in row.items()))


if __name__ == "__main__":
    main()
