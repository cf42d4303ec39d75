"""Compare the engine's logits with transformers' own Glm5Next on the same weights.

    python parity.py JOB.json RESULT.json

The job holds `reference` (a BF16 checkpoint folder), `served` (the folder the engine loads; packed
folders differ from their reference), `engine` (more keyword arguments of `vllm.LLM`), `lengths`
(prompt lengths), `decode` (greedy tokens behind each prompt) and `seed`. The result holds one row
per prompt and the means. Every position counts: those of the prompt, computed as prefill, and those
of the continuation, computed step by step; the reference is teacher-forced on the same tokens.

The reference is transformers in FP32; the yardstick is the noise of the number format itself,
transformers in BF16 against the same reference on the same tokens. A flipped argmax must be a
near-tie of the reference; a router that tips one token to another expert moves single positions far
in either, so wider flips may be 0.5 % of the positions, or twice as many as the yardstick's. One
engine per process.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KL_FLOOR = 1e-3
KL_FACTOR = 2.0
MARGIN_FLOOR_NATS = 0.05
WIDE_FACTOR = 2.0
MAX_WIDE_SHARE = 0.005
MAX_TIE_SHARE = 0.05


@dataclass(frozen=True)
class Row:
    """One prompt, against FP32: means over positions, argmax flips and their widest margin.

    The fields with `bf16` are transformers' own, the yardstick.
    """

    prompt: int
    positions: int
    kl: float
    kl_bf16: float
    median_difference: float
    flips: int
    bf16_flips: int
    widest_flip_nats: float
    bf16_widest_flip_nats: float
    wide_flips: int
    bf16_wide_flips: int


@dataclass(frozen=True)
class Report:
    """All prompts; `clamped` tells whether activations reached the SwiGLU clamp."""

    rows: tuple[Row, ...]
    kl: float
    kl_bf16: float
    clamped: bool

    def failures(self) -> list[str]:
        """What breaks the rule of the module docstring, empty when all holds."""
        allowed = max(KL_FLOOR, KL_FACTOR * self.kl_bf16)
        found = [] if self.kl <= allowed else [f"mean KL {self.kl:.2e} > {allowed:.2e}"]
        wide = sum(row.wide_flips for row in self.rows)
        positions = sum(row.positions for row in self.rows)
        noise = WIDE_FACTOR * sum(row.bf16_wide_flips for row in self.rows)
        if wide > max(noise, MAX_WIDE_SHARE * positions):
            found.append(f"{wide} of {positions} positions flip beyond a near-tie")
        for row in self.rows:
            if row.flips > max(1, MAX_TIE_SHARE * row.positions):
                found.append(f"prompt of {row.prompt}: {row.flips} flips in {row.positions}")
        return found


def prompts(lengths: Sequence[int], vocabulary: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(10, vocabulary - 64) for _ in range(n)] for n in lengths]


def served_logprobs(job: dict[str, Any], vocabulary: int) -> tuple[list[list[int]], list[Any]]:
    """Tokens of each prompt with its continuation, and log-probabilities `[positions, V]`."""
    import torch
    from vllm import LLM, SamplingParams

    arguments = {
        "model": job["served"],
        "max_model_len": 1024,
        "seed": 0,
        "max_logprobs": -1,
        "enable_prefix_caching": False,
        "language_model_only": True,
        **job.get("engine", {}),
    }
    engine = LLM(**arguments)
    parameters = SamplingParams(
        max_tokens=job.get("decode", 40),
        temperature=0,
        ignore_eos=True,
        logprobs=-1,
        prompt_logprobs=-1,
    )
    inputs = prompts(job["lengths"], vocabulary, job.get("seed", 0))
    outputs = engine.generate(
        [{"prompt_token_ids": list(p)} for p in inputs], parameters, use_tqdm=False
    )
    tokens, tables = [], []
    for prompt, output in zip(inputs, outputs, strict=True):
        steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        table = torch.full((len(steps), vocabulary), float("-inf"))
        for row, candidates in enumerate(steps):
            ids = torch.tensor(list(candidates))
            values = torch.tensor([entry.logprob for entry in candidates.values()])
            table[row, ids] = values
        tokens.append([*prompt, *output.outputs[0].token_ids])
        tables.append(table)
    return tokens, tables


def reference_logprobs(folder: str, tokens: Sequence[Sequence[int]], dtype: Any) -> list[Any]:
    """Teacher-forced log-probabilities of transformers, one `[positions, V]` per sequence."""
    import torch
    from transformers import Glm5NextForConditionalGeneration

    model = Glm5NextForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
    tables = []
    with torch.no_grad():
        for sequence in tokens:
            logits = model(input_ids=torch.tensor([list(sequence)])).logits[0, :-1]
            tables.append(torch.log_softmax(logits.float(), dim=-1))
    return tables


def reaches_clamp(folder: str, tokens: Sequence[int]) -> bool:
    """Whether a gate or up activation of an expert passes the model's `swiglu_limit`."""
    import torch
    from transformers import Glm5NextForConditionalGeneration
    from transformers.models.glm5_next import modeling_glm5_next as modeling

    seen = []
    original = modeling.Glm5NextTextExperts._apply_gate

    def spy(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        seen.append(float(gate_up.abs().max()))
        return original(self, gate_up)

    model = Glm5NextForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16).eval()
    modeling.Glm5NextTextExperts._apply_gate = spy
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([list(tokens)]))
    finally:
        modeling.Glm5NextTextExperts._apply_gate = original
    return max(seen, default=0.0) > model.config.get_text_config().swiglu_limit


def row_of(prompt: int, served: Any, bf16: Any, fp32: Any) -> Row:
    def divergence(p: Any, q: Any) -> Any:
        return (p.exp() * (p - q)).sum(-1)

    def flips(other: Any) -> tuple[int, float, int]:
        margins = margin[other.argmax(-1) != fp32.argmax(-1)]
        widest = float(margins.max()) if margins.numel() else 0.0
        near = max(MARGIN_FLOOR_NATS, 4 * float(difference.median()))
        return margins.numel(), widest, int((margins > near).sum())

    best = fp32.topk(2, dim=-1).values
    margin = best[:, 0] - best[:, 1]
    chosen = fp32.argmax(-1, keepdim=True)
    difference = (served.gather(1, chosen) - fp32.gather(1, chosen)).abs()
    count, widest, wide = flips(served)
    bf16_count, bf16_widest, bf16_wide = flips(bf16)
    return Row(
        prompt=prompt,
        positions=served.shape[0],
        kl=float(divergence(fp32, served).mean()),
        kl_bf16=float(divergence(fp32, bf16).mean()),
        median_difference=float(difference.median()),
        flips=count,
        bf16_flips=bf16_count,
        widest_flip_nats=widest,
        bf16_widest_flip_nats=bf16_widest,
        wide_flips=wide,
        bf16_wide_flips=bf16_wide,
    )


def measure(job: dict[str, Any]) -> Report:
    """Run the engine and both references; see the module docstring."""
    import torch

    config = json.loads((Path(job["reference"]) / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    tokens, served = served_logprobs(job, vocabulary)
    bf16 = reference_logprobs(job["reference"], tokens, torch.bfloat16)
    fp32 = reference_logprobs(job["reference"], tokens, torch.float32)
    rows = tuple(
        row_of(length, *tables)
        for length, *tables in zip(job["lengths"], served, bf16, fp32, strict=True)
    )
    count = sum(row.positions for row in rows)
    return Report(
        rows=rows,
        kl=sum(row.kl * row.positions for row in rows) / count,
        kl_bf16=sum(row.kl_bf16 * row.positions for row in rows) / count,
        clamped=reaches_clamp(job["reference"], tokens[-1]),
    )


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    report = measure(job)
    result = {**asdict(report), "failures": report.failures()}
    Path(sys.argv[2]).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
