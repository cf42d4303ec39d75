"""`python -m glm_exl3.dummy`: write folders for `--load-format exl3_dummy`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from glm_exl3.dummy.folder import write_drafter, write_target
from glm_exl3.dummy.geometry import LAYERS, rank_geometry, real_geometry
from glm_exl3.ref.tiny.recipe import Family


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m glm_exl3.dummy", description=__doc__)
    made.add_argument("--family", required=True, choices=["tr3", "full"])
    made.add_argument("--out", required=True, type=Path, help="folder of the target")
    made.add_argument("--layers", type=int, default=LAYERS)
    made.add_argument("--experts", type=int, default=288, help="routed experts per layer")
    made.add_argument("--ranks", type=int, default=1, help="shapes of one rank of so many")
    made.add_argument("--drafter", type=Path, help="also write the DFlash2 drafter here")
    made.add_argument("--drafter-format", choices=["bf16", "exl3"], default="exl3")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what the arguments ask for; returns the exit status."""
    options = parser().parse_args(arguments)
    geometry = rank_geometry(real_geometry(options.layers, options.experts), options.ranks)
    write_target(options.out, Family(options.family), geometry)
    if options.drafter:
        write_drafter(options.drafter, geometry, packed=options.drafter_format == "exl3")
    return 0
