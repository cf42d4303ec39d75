"""Compile every CUDA source for all architectures; print registers and spills of each kernel.

`python -m kernels.compile [--sample] [--source NAME ...] [--out FILE]` needs nvcc but no GPU.
Without nvcc it says so and succeeds, so that it may run anywhere; a source that does not compile
fails it. `--sample` takes every shared source and one rate of each codebook, and of two
architectures that differ in name only the later. The whole table is kept in
`bench/kernels/results/compiled.md`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from glm_exl3.ops import ext

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_RELEASE = re.compile(r"release (\S+),")
_CODEBOOKS = {"0": "3inst", "1": "mcg", "2": "mul1"}
_OF_ONE_RATE = re.compile(r"_k\d_(mcg|mul1)$")
SAMPLED = ("_k4_mcg", "_k3_mul1")
SAMPLED_ARCHITECTURES = tuple(name for name in ext.ARCHITECTURES if name != "12.0")


@dataclass(frozen=True)
class Usage:
    """One kernel on one architecture; spills in bytes per thread."""

    kernel: str
    architecture: str
    registers: int
    spill_stores: int
    spill_loads: int


def readable(symbol: str) -> str:
    """`moe_gate_up K4 mcg 1` from the mangled name: kernel, rate, codebook, other constants."""
    match = re.search(r"\d([a-z][a-z_]*?)(?:I(.*?)EEv|E?v?N)", symbol)
    if match is None:
        return symbol
    name, constants = match.group(1), match.group(2) or ""
    codebook = re.search(r"CodebookE(\d)E", constants)
    end = re.search(r"\d(GateUp|Down)End", constants)
    numbers = re.findall(r"L[ib](\d+)E", constants)
    words = [name]
    if numbers:
        words.append(f"K{numbers[0]}")
    if codebook:
        words.append(_CODEBOOKS[codebook.group(1)])
    if end:
        words.append(end.group(1))
    return " ".join(words + numbers[1:])


def usages(log: str) -> list[Usage]:
    """Every kernel in the output of `nvcc -Xptxas -v`."""
    found, entry, spills = [], None, (0, 0)
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = (readable(match.group(1)), match.group(2))
        elif match := _SPILLS.search(line):
            spills = (int(match.group(1)), int(match.group(2)))
        elif (match := _REGISTERS.search(line)) and entry is not None:
            found.append(Usage(*entry, int(match.group(1)), *spills))
            entry = None
    return found


def table(found: list[Usage]) -> str:
    """Registers by kernel and architecture, spilled bytes (stores+loads) behind them if any."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for usage in found:
        spilled = usage.spill_stores + usage.spill_loads
        text = f"{usage.registers}" + (f" ({spilled} B)" if spilled else "")
        cells[usage.kernel][usage.architecture] = text
    columns = sorted({usage.architecture for usage in found}, key=lambda name: int(name.strip("a")))
    lines = ["| kernel | " + " | ".join(f"sm_{name}" for name in columns) + " |"]
    lines.append("| --- |" + " --- |" * len(columns))
    for kernel in sorted(cells):
        row = (cells[kernel].get(column, "") for column in columns)
        lines.append(f"| {kernel} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def in_sample(name: str) -> bool:
    """Whether `--sample` compiles the source called `name` (without suffix)."""
    return not _OF_ONE_RATE.search(name) or name.endswith(SAMPLED)


@dataclass(frozen=True)
class Compiled:
    """What nvcc said of one source: an error or the kernels in it."""

    source: str
    error: str | None
    kernels: list[Usage]


def _compile(command: list[str]) -> Compiled:
    name = Path(command[command.index("-c") + 1]).name
    verbose = [*command, "-Xptxas", "-v"] if name.endswith(".cu") else command
    done = subprocess.run(verbose, capture_output=True, text=True, check=False)
    failed = done.returncode != 0
    return Compiled(name, done.stderr if failed else None, [] if failed else usages(done.stderr))


def compile_all(
    compiler: Path, wanted: Callable[[str], bool], jobs: int, architectures: tuple[str, ...]
) -> list[Compiled]:
    """Compile the sources whose names without suffix are `wanted`, `jobs` at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        commands = [
            command
            for command in ext.compile_commands(compiler, Path(folder), architectures)
            if wanted(Path(command[command.index("-c") + 1]).stem)
        ]
        return list(pool.map(_compile, commands))


def page(compiler: Path, results: Sequence[Compiled]) -> str:
    """The note: compiler, date, digest of the sources, registers and spills."""
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    release = _RELEASE.search(told.stdout)
    version, date = release.group(1) if release else "?", time.strftime("%Y-%m-%d")
    return f"""\
# Registers per thread, spilled bytes in brackets

nvcc {version}, {date}, sources {ext.source_digest()}; `python -m kernels.compile --out FILE`.
Constants behind the codebook: of dense kernels token tiles of eight, then products of integers (0:
halves), whether the activations come rotated, and of `linear_parts` whether gate and up leave as
their activation. The tile kernels for warpgroups (`prefill_kernel`) are compiled for Hopper only.

{table([usage for result in results for usage in result.kernels])}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the CUDA sources for all architectures.")
    parser.add_argument("--source", nargs="*", help="names without suffix; default all")
    parser.add_argument("--sample", action="store_true", help="one rate of each codebook")
    parser.add_argument("--out", type=Path, help="write the note there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    compiler = ext.nvcc()
    if compiler is None:
        print("no nvcc in CUDA_HOME or PATH: the CUDA sources were NOT compiled")
        return 0

    def wanted(name: str) -> bool:
        chosen = not given.source or name in given.source
        return chosen and (not given.sample or in_sample(name))

    architectures = SAMPLED_ARCHITECTURES if given.sample else ext.ARCHITECTURES
    results = compile_all(compiler, wanted, given.jobs, architectures)
    failures = [result for result in results if result.error is not None]
    for result in failures:
        print(f"{result.source} does not compile:\n{result.error}")
    text = page(compiler, results)
    print(text)
    print(f"{len(results) - len(failures)} of {len(results)} sources compiled")
    if given.out is not None and not failures:
        given.out.write_text(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
