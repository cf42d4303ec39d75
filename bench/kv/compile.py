"""Compile the Triton kernels for all architectures without a GPU.

`python -m kv.compile [--sample] [--only TEXT] [--out FILE]`. A kernel fails that does not compile
or needs more shared memory than its architecture has. The table gives registers, the bytes of
stack a thread spills to and shared memory; the whole of it is in `bench/kv/results/compiled.md`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from glm_exl3.attention.tiles import shared_bytes
from kv.cases import Case, all_cases, sample

DIVISIBLE = 16
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
NOT_DIVISIBLE = ("heads", "columns", "tokens", "table_width", "splits", "count")
NOT_DIVISIBLE_TOO = ("table_stride", "table", "request", "positions", "ring_slots")


@dataclass(frozen=True)
class Built:
    """One compiled kernel; bytes, and registers per thread."""

    case: Case
    registers: int
    stack: int
    shared: int
    copies: int
    seconds: float


def source(case: Case) -> ASTSource:
    """The kernel with its types; pointers and strides are taken as multiples of 16."""
    names = list(case.kernel.arg_names)
    types = {n: case.signature.get(n, "constexpr") for n in names}
    constants = {(names.index(n),): value for n, value in case.constants.items()}
    loose = {*NOT_DIVISIBLE, *NOT_DIVISIBLE_TOO}
    attributes = {
        (place,): [["tt.divisibility", DIVISIBLE]]
        for place, name in enumerate(names)
        if name in case.signature and name not in loose and case.signature[name] != "fp32"
    }
    kind = GluonASTSource if case.kernel.is_gluon() else ASTSource
    return kind(fn=case.kernel, signature=types, constexprs=constants, attrs=attributes)


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, from the tool in Triton's own wheel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    match = _USAGE.search(done.stdout + done.stderr)
    if match is None:
        raise RuntimeError(f"no usage in the output of cuobjdump:\n{done.stdout}{done.stderr}")
    return int(match[1]), int(match[2])


def build(case: Case) -> Built:
    """Compile one case. Raises what Triton raises."""
    started = time.perf_counter()
    target = GPUTarget("cuda", case.architecture, 32)
    made = triton.compile(source(case), target=target, options={"num_warps": case.warps})
    registers, stack = usage(made.asm["cubin"])
    copies = made.asm["ptx"].count("cp.async.c")
    seconds = time.perf_counter() - started
    return Built(case, registers, stack, made.metadata.shared, copies, seconds)


def table(found: Sequence[Built]) -> str:
    lines = [
        "| kernel | SM | tile | warps | registers | stack B | shared KB of limit | async copies |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in sorted(found, key=lambda b: (b.case.name, b.case.architecture)):
        constants, case = one.case.constants, one.case
        tile = "x".join(str(constants[name]) for name in ("BH", "BK") if name in constants)
        limit = shared_bytes(case.architecture) >> 10
        lines.append(
            f"| {case.name} | {case.architecture} | {tile} | {case.warps} | {one.registers} "
            f"| {one.stack} | {one.shared / 1024:.1f} of {limit} | {one.copies} |"
        )
    return "\n".join(lines)


def page(found: Sequence[Built], wanted: int) -> str:
    """The note; of `wanted` kernels it has those found so far."""
    made = (
        f"Triton {version('triton')}, {time.strftime('%Y-%m-%d')}; {len(found)} of {wanted} kernels"
    )
    return f"""\
# Triton kernels of the latent cache, compiled without a GPU

{made}; `python -m kv.compile --out FILE`. Stack is what a thread keeps outside registers; async
copies are `cp.async` instructions in the PTX, of which row gathers have 16 bytes each. Heads are
those of a rank; their number is an argument, so one kernel serves several.

{table(found)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels of the latent cache.")
    parser.add_argument("--sample", action="store_true", help="a few of them, as CI does")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--out", type=Path, help="write the note there")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    cases = [
        case for case in (sample() if given.sample else all_cases()) if given.only in case.name
    ]
    found, failures = [], []
    for case in cases:
        label = f"{case.name} on SM{case.architecture}"
        try:
            built = build(case)
        except Exception as error:  # noqa: BLE001 - any failure is the result
            failures.append(f"{label} does not compile: {type(error).__name__}: {error}")
            continue
        found.append(built)
        if given.out is not None:
            given.out.write_text(page(found, len(cases)))
        limit = shared_bytes(case.architecture)
        if built.shared > limit:
            failures.append(f"{label} needs {built.shared} of {limit} bytes of shared memory")
    print(table(found))
    print("\n".join([*failures, f"{len(cases) - len(failures)} of {len(cases)} kernels fit"]))
    return 1 if failures or not found else 0


if __name__ == "__main__":
    sys.exit(main())
