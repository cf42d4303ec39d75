"""`python -m glm_exl3.ref.tiny`: write tiny checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from glm_exl3.ref.tiny.build import build_drafter, build_target
from glm_exl3.ref.tiny.recipe import Family


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m glm_exl3.ref.tiny", description=__doc__)
    made.add_argument("--family", required=True, choices=[family.value for family in Family])
    made.add_argument("--out", required=True, type=Path, help="folder of the target")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--drafter", type=Path, help="also write the DFlash2 drafter here")
    made.add_argument(
        "--drafter-format", choices=["bf16", "exl3"], default="bf16", help="exl3 is 6 bits"
    )
    made.add_argument(
        "--twin-of", choices=["tr3", "full"], default="tr3", help="packed family behind bf16"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what the arguments ask for; returns the exit status."""
    options = parser().parse_args(arguments)

    def progress(line: str) -> None:
        print(line, flush=True)

    family, twin_of = Family(options.family), Family(options.twin_of)
    build_target(options.out, family, options.seed, twin_of, progress)
    if options.drafter:
        packed = options.drafter_format == "exl3"
        source = twin_of if family is Family.BF16 else family
        build_drafter(options.drafter, source, options.seed, packed=packed, progress=progress)
    return 0
