"""Compile every CUDA source for all architectures; print registers and spills of each kernel.

`python -m kernels.compile [--source NAME ...]` needs nvcc but no GPU. Without nvcc it says so and
succeeds, so that it may run anywhere; a source that does not compile fails it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from glm_exl3.ops import ext

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_CODEBOOKS = {"0": "3inst", "1": "mcg", "2": "mul1"}


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


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the CUDA sources for all architectures.")
    parser.add_argument("--source", nargs="*", help="names without suffix; default all")
    wanted = parser.parse_args().source
    compiler = ext.nvcc()
    if compiler is None:
        print("no nvcc in CUDA_HOME or PATH: the CUDA sources were not compiled")
        return 0
    found: list[Usage] = []
    with tempfile.TemporaryDirectory() as folder:
        for command in ext.compile_commands(compiler, Path(folder)):
            source = Path(command[command.index("-c") + 1])
            if source.suffix != ".cu" or (wanted and source.stem not in wanted):
                continue
            verbose = [*command, "-Xptxas", "-v"]
            done = subprocess.run(verbose, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                print(f"{source.name} does not compile:\n{done.stderr}")
                return 1
            found += usages(done.stderr)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
