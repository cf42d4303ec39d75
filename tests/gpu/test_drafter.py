"""Packing a drafter with the CUDA encoder: the miniature's, from folder to folder."""

from __future__ import annotations

from pathlib import Path

import torch

from glm_exl3.drafter.pack import Options, pack
from glm_exl3.format.metadata import check_checkpoint

DRAFTER = Path(__file__).parents[2] / "bench" / "nano" / "model" / "drafter"


def test_a_drafter_is_packed_on_the_gpu_twice_alike(tmp_path: Path) -> None:
    errors: list[float] = []
    for name in ("first", "second"):
        pack(
            DRAFTER, tmp_path / name, Options(), device=torch.device("cuda"),
            progress=lambda _job, error: errors.append(error),
        )  # fmt: skip
    first, second = ((tmp_path / name / "model.safetensors").read_bytes()
                     for name in ("first", "second"))  # fmt: skip
    assert first == second
    assert max(errors) < 0.03
    assert len(check_checkpoint(tmp_path / "first").modules) == 15
