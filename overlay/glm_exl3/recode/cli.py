"""`python -m glm_exl3.recode`: make the matrices of DENSE_RECODE=exl3 once.

Settings come from the environment, as the server reads them, unless an option says otherwise. A run
that was stopped goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from glm_exl3 import envs
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.recode import BITS, parse_groups
from glm_exl3.plugin import register_edits
from glm_exl3.quant.facts import find_folder, read_facts
from glm_exl3.recode import make

FAILED = 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m glm_exl3.recode", description=__doc__)
    made.add_argument("model", help="folder of the checkpoint, or its name in the local hub cache")
    made.add_argument("--revision")
    made.add_argument("--bits", type=int, choices=BITS, help=f"instead of {envs.DENSE_BITS.name}")
    made.add_argument("--groups", type=parse_groups, help=f"instead of {envs.DENSE_GROUPS.name}")
    made.add_argument("--cache", help=f"folder, instead of {envs.DENSE_CACHE.name}")
    made.add_argument("--device", help="cuda, cuda:1 or cpu; by default a GPU if there is one")
    made.add_argument("--verify", action="store_true", help="hash what exists already")
    made.add_argument("--dry-run", action="store_true", help="only say what is to be done")
    made.add_argument(
        "--headers-only", action="store_true", help="no weights, for --load-format exl3_dummy"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is missing; returns the exit status: 0, or 2 with a message."""
    options = parser().parse_args(arguments)
    try:
        make_all(options)
    except GlmExl3Error as error:
        print(f"glm-exl3: error: {error}", file=sys.stderr)
        return FAILED
    return 0


def make_all(options: argparse.Namespace) -> None:
    """Plan and run. Raises GlmExl3Error."""
    if options.cache is not None:
        os.environ[envs.DENSE_CACHE.name] = options.cache
    asked = replace(envs.dense_recode(), scheme="exl3")
    recode = replace(asked, bits=options.bits or asked.bits, groups=options.groups or asked.groups)
    register_edits()
    facts = read_facts(find_folder(options.model, options.revision))
    work = make.plan(facts, recode, verify=options.verify)
    print(
        f"{recode}: {len(work.done)} units exist, {len(work.pending)} to make "
        f"({work.pending_tiles} tiles of 256 weights) in {work.folder}"
    )
    if options.dry_run:
        return
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tqdm: Any = import_module("tqdm").tqdm  # comes with vLLM, without types
    with tqdm(total=work.pending_tiles, unit="tile", unit_scale=True, mininterval=1) as bar:

        def step(tiles: int) -> None:
            bar.update(tiles)

        make.run(work, recode, device, step, headers_only=options.headers_only)
