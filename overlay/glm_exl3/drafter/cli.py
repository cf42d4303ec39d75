"""`python -m glm_exl3.drafter SOURCE OUT`: the command line of packing."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from glm_exl3.drafter.finish import licence_of, notice
from glm_exl3.drafter.pack import BITS, Options, pack
from glm_exl3.drafter.recipe import Job
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.layout import Codebook


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m glm_exl3.drafter",
        description="Pack a BF16 DFlash2 drafter as EXL3. Killed anywhere, it goes on next time.",
    )
    made.add_argument("source", type=Path, help="folder of the drafter")
    made.add_argument("out", type=Path, help="new folder for the packed one")
    made.add_argument("--bits", type=int, default=6, choices=BITS)
    made.add_argument("--codebook", default="mul1", choices=["mul1", "mcg"])
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack, with a progress bar; 2 for what is refused, 130 when interrupted."""
    given = parser().parse_args(arguments)
    options = Options(given.bits, Codebook(given.codebook), given.seed)
    try:
        _with_bar(given.source, given.out, options, torch.device(given.device))
    except GlmExl3Error as error:
        print(f"{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    size = sum(path.stat().st_size for path in given.out.glob("*.safetensors"))
    print(f"packed {given.out} ({size / 2**30:.2f} GiB)")
    print(notice(licence_of(given.source)))
    print(f"to use it, put into .env: DFLASH_MODEL={given.out}")
    return 0


def _with_bar(source: Path, out: Path, options: Options, device: torch.device) -> None:
    from rich.console import Console
    from rich.progress import Progress, TimeRemainingColumn

    from glm_exl3.drafter.recipe import jobs
    from glm_exl3.format.metadata import CheckpointIndex

    total = sum(job.weights for job in jobs(CheckpointIndex.read(source).tensors))
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"packing on {device}", total=total)

        def show(job: Job, error: float) -> None:
            bar.advance(task, job.weights)
            said = "kept from before" if math.isnan(error) else f"error {error:.4f}"
            bar.console.print(f"{job.modules[0]}: {said}", highlight=False)

        pack(source, out, options, device=device, progress=show)
