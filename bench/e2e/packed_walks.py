"""Accepted drafts of the BF16 and the packed drafter on the same greedy texts, without an engine.

    python -m e2e.packed_walks JOB.json RESULT.json [--out FIGURES.json]

JOB and RESULT are those of `tests/engine/in_process.py` for the miniature's target: its prompts and
the text that the engine wrote. The training modules run once over the texts, with the target's
packed weights decoded; each drafter walks them from where the prompt ends, as verification would.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from glm_exl3.ref.tiny.twin import decode_modules, read_tensors
from nano.checkpoint import fill
from nano.drafter import Drafter, DrafterGeometry
from nano.evaluate import drafter_walks, per_step
from nano.geometry import nano_geometry
from nano.model import Nano, Predictor
from nano.restore import decoded_target

MODEL = Path(__file__).parents[1] / "nano" / "model"
DRAFTERS = ("drafter", "drafter-6bpw")


def load(drafter: Drafter, folder: Path) -> None:
    """Weights of a drafter's folder, decoded where packed, without the padding of packing."""
    own = drafter.state_dict()
    stored = decode_modules(read_tensors(folder), torch.bfloat16)
    drafter.load_state_dict({name: one[: own[name].shape[0]] for name, one in stored.items()})


@torch.no_grad()
def measure(job: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Accepted drafts per step by drafter, and the packed one's share of the other's."""
    geometry = nano_geometry()
    target, predictor = Nano(geometry.text).eval(), Predictor(geometry.text).eval()
    fill(decoded_target(Path(job["engine"]["model"]), torch.device("cpu")), target, predictor)
    pairs = zip(job["prompts"], result["lines"], strict=True)
    texts = torch.tensor([[*prompt, *line["tokens"]] for prompt, line in pairs])
    drafter = Drafter(DrafterGeometry.of(geometry)).eval()
    found: dict[str, Any] = {"texts": len(texts), "tokens": job["max_tokens"]}
    for name in DRAFTERS:
        load(drafter, MODEL / name)
        walks = drafter_walks(target, drafter, texts, len(job["prompts"][0]))
        found[name] = {"accepted_per_step": per_step(walks), "steps": sum(s for _, s in walks)}
    both = [found[name]["accepted_per_step"] for name in DRAFTERS]
    return found | {"ratio": both[1] / both[0]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the figures; 1 when packing costs more than two percent."""
    parser = argparse.ArgumentParser(prog="python -m e2e.packed_walks")
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    found = measure(*(json.loads(path.read_text()) for path in (given.job, given.result)))
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    return int(found["ratio"] < 0.98)


if __name__ == "__main__":
    sys.exit(main())
