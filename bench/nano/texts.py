"""Let BF16 and the packed models write 2,000 tokens after many prompts.

`python -m nano.texts SHARDS MODEL STREAMS OUT` reads the BF16 shards and the packed folders below
MODEL, decoded, and writes OUT/texts-NAME.safetensors: `tokens` `[2, prompts, 2000]` int16, at
temperature 0 and 0.7. `nano.longtext` judges them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nano import data
from nano.checkpoint import fill, load_shards
from nano.decode import generate
from nano.evaluate import held_out_windows
from nano.geometry import nano_geometry
from nano.model import Nano, in_evaluation
from nano.packing import RECIPES
from nano.restore import decoded_target

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 48, 64, 2000
TEMPERATURES = (0.0, 0.7)


def long_texts(target: Nano, windows: Tensor) -> Tensor:
    """2,000 tokens after the beginning of each window at each temperature, `[2, N, T]` int16."""
    prompts = windows[:, :PROMPT_TOKENS]
    count = len(TEMPERATURES)
    warmth = torch.tensor(TEMPERATURES, device=prompts.device).repeat_interleave(len(prompts))
    lengths = torch.full_like(warmth, PROMPT_TOKENS, dtype=torch.long)
    torch.manual_seed(14)
    total = PROMPT_TOKENS + NEW_TOKENS
    texts = generate(target, prompts.repeat(count, 1), lengths, total, warmth)
    return texts[:, PROMPT_TOKENS:].unflatten(0, (count, -1)).short().cpu()


def main() -> None:
    shards, models, scratch, out = map(Path, sys.argv[1:])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, predictor = in_evaluation(nano_geometry().text, device)
    windows = held_out_windows(data.loaded(scratch, device).held_out, 2048, PROMPTS)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("bf16", *RECIPES):
        begin = time.monotonic()
        bf16 = name == "bf16"
        tensors = load_shards(shards, "target-") if bf16 else decoded_target(models / name, device)
        fill(tensors, target, predictor)
        tokens = long_texts(target, windows)
        save_file({"tokens": tokens}, out / f"texts-{name}.safetensors")
        print(f"texts of {name}: {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
