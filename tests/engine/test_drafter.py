"""The packed drafter drafts for the miniature as well as its BF16 source, through the engine.

`bench/nano/model/drafter-6bpw` is what `python -m glm_exl3.drafter` makes of the BF16 drafter; the
accepted drafts of both over the whole panel are in docs/drafting.md.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from equivalence import MAX_WIDE_SHARE
from service import KEY, serving
from service import MODEL as NAME

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "bench" / "nano" / "model"
PANEL = json.loads((ROOT / "tests" / "bench" / "nano_panel.json").read_text())
LEAST = 0.8
"""Half the panel, 48 tokens: 1.24 by the training modules, less four times the noise of the gate's
96 tokens after all of it; a drafter that lost a matrix falls far below."""

pytestmark = pytest.mark.engine


def engine(drafter: str) -> dict[str, Any]:
    speculation = {
        "method": "dflash",
        "model": str(MODEL / drafter),
        "num_speculative_tokens": 7,
    }
    return {
        "model": str(MODEL / "full-4bpw"),
        "limit_mm_per_prompt": {"image": 0, "video": 0},
        "speculative_config": speculation,
    }


def accepted(result: dict[str, Any]) -> float:
    counters = result["counters"]
    steps = counters["vllm:spec_decode_num_drafts"]
    return counters["vllm:spec_decode_num_accepted_tokens"] / steps


def test_the_packed_drafter_drafts(run_engine: Any) -> None:
    result = run_engine(engine("drafter-6bpw"), PANEL["prompts"][::2], 48)
    assert accepted(result) >= LEAST, accepted(result)


@pytest.mark.long
def test_packing_costs_at_most_two_percent_of_the_accepted_drafts(run_engine: Any) -> None:
    own = run_engine(engine("drafter"), PANEL["prompts"], 96)
    packed = run_engine(
        engine("drafter-6bpw"), PANEL["prompts"], 96, reference=own["lines"],
        wide_share=MAX_WIDE_SHARE,
    )  # fmt: skip
    assert not packed["comparison"]["broken"], packed["comparison"]
    assert accepted(packed) >= 0.98 * accepted(own), (accepted(packed), accepted(own))


@pytest.mark.long
def test_the_committed_drafter_is_what_the_command_makes(tmp_path: Path) -> None:
    from glm_exl3.drafter.cli import main

    out = tmp_path / "packed"
    assert main([str(MODEL / "drafter"), str(out), "--device", "cpu"]) == 0
    committed = MODEL / "drafter-6bpw" / "model.safetensors"
    assert (out / "model.safetensors").read_bytes() == committed.read_bytes()


def drafting(drafter: Path) -> dict[str, str]:
    return {"SPEC_METHOD": "dflash", "DFLASH_MODEL": str(drafter), "RANKS": "1"}


@pytest.mark.long
def test_a_launch_tells_its_acceptance_in_every_reply(tmp_path: Path) -> None:
    """The warm-up of the miniature passes, and a reply says what became of its own drafts."""
    with serving(MODEL / "full-4bpw", tmp_path, drafting(MODEL / "drafter-6bpw")) as base:
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": "What does json.dumps return?"}],
            "max_tokens": 48,
        }
        headers = {"Authorization": f"Bearer {KEY}"}
        reply = httpx.post(
            f"{base}/v1/chat/completions", json=body, headers=headers, timeout=300
        ).json()
        own = reply["metrics"]["speculative_decoding"]
        assert own["num_draft_tokens"] == 7 * own["num_spec_steps"] > 0
        assert sum(own["acceptance_histogram"]) == own["num_spec_steps"]
        assert "vllm:spec_decode_num_accepted_tokens_per_pos" in httpx.get(f"{base}/metrics").text


@pytest.mark.long
def test_a_launch_with_a_drafter_of_random_weights_is_given_up(tmp_path: Path) -> None:
    folder = tmp_path / "random"
    shutil.copytree(MODEL / "drafter", folder)
    weights = folder / "model-00001-of-00001.safetensors"
    generator = torch.Generator().manual_seed(0)
    random = {
        name: torch.randn(one.shape, generator=generator).to(one.dtype) * 0.05
        for name, one in load_file(weights).items()
    }
    save_file(random, weights, {"format": "pt"})
    with pytest.raises(AssertionError, match="drafted tokens were accepted over the warm-up"):
        with serving(MODEL / "full-4bpw", tmp_path / "state", drafting(folder)):
            pass
