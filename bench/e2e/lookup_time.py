"""Time of a lookup on a GPU, as the drafter's graph holds it.

    python -m e2e.lookup_time RESULT.json [--length 131072] [--rows 1,4,16]

Texts of `--length` tokens without a match, the worst case, in device memory and, as vLLM keeps
them, in pinned host memory. One CUDA graph of a lookup and its point masses, replayed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from glm_exl3.spec.lookup import Lookup

OWN, STEPS, WIDTH, VOCABULARY, LEAST = 7, 7, 8, 154_880, 6
REPLAYS = 200


def measure(rows: int, length: int, *, pinned: bool) -> float:
    """Microseconds of one lookup for `rows` requests."""
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    device = torch.device("cuda")
    host = torch.arange(rows * length, dtype=torch.int32).view(rows, length) % VOCABULARY
    tokens = get_accelerator_view_from_cpu_tensor(host.pin_memory()) if pinned else host.to(device)
    lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
    requests = torch.arange(rows, device=device)
    drafted = torch.ones(rows, OWN, dtype=torch.int64, device=device)
    logits = torch.full((rows, STEPS, VOCABULARY), float("-inf"), device=device)
    candidates = torch.zeros(rows, OWN, WIDTH, dtype=torch.int64, device=device)
    repeated = torch.zeros(rows, STEPS - OWN, dtype=torch.int64, device=device)
    lookup = Lookup(rows, length, STEPS, device, LEAST)

    def once() -> None:
        lookup.propose(tokens, lengths, requests, drafted)
        lookup.point_masses(logits, candidates, repeated, requests)

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(20):
        graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * start.elapsed_time(end) / REPLAYS


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, measure, write and show."""
    parser = argparse.ArgumentParser(prog="python -m e2e.lookup_time")
    parser.add_argument("result", type=Path)
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--rows", type=lambda s: [int(n) for n in s.split(",")], default=[1, 4, 16])
    options = parser.parse_args(arguments)
    found = []
    for rows in options.rows:
        for pinned in (False, True):
            us = measure(rows, options.length, pinned=pinned)
            where = "host" if pinned else "device"
            row = {"rows": rows, "length": options.length, "texts_in": where, "us": us}
            found.append(row)
            print(f"{rows:3} requests, texts in {where:6}: {us:8.1f} us", flush=True)
    options.result.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
