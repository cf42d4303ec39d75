"""The kernels compile for every architecture without a GPU, a few of them here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kv.cases import ARCHITECTURES, all_cases

ROOT = Path(__file__).parents[3]
NOTE = ROOT / "bench" / "kv" / "results" / "compiled.md"


@pytest.mark.slow
def test_a_sample_compiles_for_every_architecture() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'overlay'}:{ROOT / 'bench'}"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "kv.compile", "--sample"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    for architecture in (80, 86, 89, 90, 120, 121):
        assert f"| {architecture} |" in done.stdout


def test_the_note_has_every_kernel_with_the_tile_it_is_launched_with() -> None:
    rows = [line.strip("| ").split(" | ") for line in NOTE.read_text().splitlines() if "|" in line]
    noted = {(name, int(sm), tile.strip(), int(warps)) for name, sm, tile, warps, *_ in rows[2:]}
    wanted = {
        (
            case.name,
            case.architecture,
            "x".join(str(case.constants[name]) for name in ("BH", "BK") if name in case.constants),
            case.warps,
        )
        for case in all_cases()
    }
    assert {architecture for _, architecture, _, _ in wanted} == set(ARCHITECTURES)
    assert noted == wanted, "run python -m kv.compile --out bench/kv/results/compiled.md"


def test_every_noted_kernel_fits_into_shared_memory() -> None:
    found = re.findall(r"([\d.]+) of (\d+) \|", NOTE.read_text())
    assert len(found) == len(all_cases())
    assert all(float(used) <= float(limit) for used, limit in found)
