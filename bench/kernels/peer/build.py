"""`python -m kernels.peer.build WHEEL OUT`: the peer's kernels that the table calls, one library.

WHEEL is `exllamav3-1.6.5-py3-none-any.whl` from PyPI; the sources travel inside it. Only the files
behind the calls are compiled (about twenty minutes of CPU time instead of more than an hour) for
the GPU at hand; what they refer to and the table never calls, such as rates it has no row for,
becomes a function that returns null: their tables of kernels ask every rate for its pointer when
loaded.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from glm_exl3.ops import ext

BINDINGS = Path(__file__).with_name("bindings.cpp")
# Compilation units of the rates in `kernels.cases`; cb1 is mcg, cb2 mul1.
RATED = (
    *(f"exl3_comp_unit_{bits}_cb[12]" for bits in (4, 5, 6)),
    *("exl3_moe_coop_inst_k4", "exl3_moe_inst_k4_cb1"),
    *("exl3_moe_coop_inst_k3", "exl3_moe_inst_k3_cb2*"),
)
_UNDEFINED = re.compile(r"undefined reference to `([^']+)'")


def sources(root: Path) -> list[Path]:
    """The translation units behind the bindings, slowest first."""
    units = root / "quant" / "comp_units"
    named = [
        root / "quant" / f"{name}.cu"
        for name in (
            *("exl3_moe_coop", "exl3_gemv", "coop_autotune", "exl3_gemv_int8", "exl3_moe"),
            *("reconstruct", "exl3_gemm", "hadamard", "exl3_kernel_map", "exl3_devctx", "util"),
        )
    ]
    named += [root / f"{name}.cu" for name in ("activation", "hgemm", "hgemm_f16acc")]
    named += [path for pattern in RATED for path in sorted(units.glob(f"{pattern}.cu"))]
    return [path for path in named if path.is_file()]


def flags(root: Path, architecture: str) -> list[str]:
    include = Path(torch.__file__).parent / "include"
    packaged = sorted(Path(torch.__file__).parent.parent.glob("nvidia/cu*/include"))
    python = Path(sysconfig.get_paths()["include"])  # Python.h: the peer's headers include pybind11
    folders = [root, include, include / "torch" / "csrc" / "api" / "include", *packaged, python]
    number = architecture.replace(".", "")
    return [
        *("-O3", "-std=c++20", "--use_fast_math", "-Xcompiler", "-fPIC"),
        *("-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__"),
        *("-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__"),
        *("--expt-relaxed-constexpr", f"-gencode=arch=compute_{number},code=sm_{number}"),
        *(f"-I{folder}" for folder in folders),
    ]


def compile_one(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{command[-3]}: {done.stderr[-1500:]}"


def link(compiler: Path, objects: Path, target: Path) -> int:
    """Link what there is; returns how many symbols had no definition and return null."""
    library = Path(torch.__file__).parent / "lib"
    names = [str(path) for path in sorted(objects.glob("*.o"))]
    torch_libraries = [
        f"-L{library}",
        "-lc10",
        "-lc10_cuda",
        "-ltorch_cpu",
        "-ltorch_cuda",
        "-ltorch",
    ]
    command = [str(compiler), "-shared", "-o", str(target), *names, *torch_libraries]
    strict = [*command, "-Xlinker", "-z,defs", "-Xlinker", "--no-demangle"]
    told = subprocess.run(strict, capture_output=True, text=True, check=False).stderr
    missing = sorted(set(_UNDEFINED.findall(told)))
    own = [name for name in missing if not name.startswith(("cublas", "cu", "Py"))]
    absent = objects / "absent.s"
    lines = [f".weak {name}\n{name}: xorl %eax, %eax\nret" for name in own]
    absent.write_text(".text\n" + "\n".join(lines) + "\n")
    subprocess.run(["c++", "-c", str(absent), "-o", str(objects / "absent.o")], check=True)
    done = subprocess.run(
        [*command, "-Xlinker", "-s", str(objects / "absent.o")],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr[-3000:])
    return len(own)


def build(
    wheel: Path,
    target: Path,
    architecture: str,
    jobs: int | None,
    units_of: Callable[[Path], list[Path]] = lambda root: [BINDINGS, *sources(root)],
) -> list[str]:
    """Build the files that `units_of` names below the sources of the wheel's extension.

    Returns what did not compile; the rest is linked all the same, for the rows it can serve.
    """
    compiler = ext.nvcc()
    if compiler is None:
        raise SystemExit("no nvcc in CUDA_HOME or PATH: the peer cannot be built")
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        root = Path(folder) / "exllamav3" / "exllamav3_ext"
        objects = Path(folder) / "objects"
        objects.mkdir()
        units = units_of(root)
        arguments = [str(compiler), *flags(root, architecture), "-c"]
        commands = [[*arguments, str(u), "-o", str(objects / f"{u.stem}.o")] for u in units]
        with ThreadPoolExecutor(jobs) as pool:
            failures = [message for message in pool.map(compile_one, commands) if message]
        absent = link(compiler, objects, target)
        print(f"{len(units)} files, {absent} symbols left out: {target}")
        return failures


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the peer's kernels for the kernel table.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--architecture", default="9.0")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    failures = build(given.wheel, given.target, given.architecture, given.jobs)
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
