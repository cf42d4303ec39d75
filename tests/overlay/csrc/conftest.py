"""Kernels of CUDA compiled for the host, where threads are fibers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from glm_exl3.ops import ext

HOST = Path(__file__).parent / "host"
FLAGS = (
    *("-std=c++17", "-Og", "-fno-strict-aliasing", "-Wno-unknown-pragmas"),
    *("-fno-extern-tls-init", "-include", "one_rate.h", "-x", "c++"),
)
Program = Callable[..., bytearray]


def stored_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Program]:
    """`compiled("rows", *sources)` is `rows_main.cpp` and these of the kernels' sources.

    `program(*words, tensors, name=number, ..)` is what it writes to standard output.
    """

    def compile_program(name: str, *sources: str) -> Program:
        folder = tmp_path_factory.mktemp(name)
        for file in (*ext.SOURCES.glob("*.*"), *HOST.iterdir()):  # stand-ins replace sources
            shutil.copy(file, folder)
        files = [str(folder / file) for file in (f"{name}_main.cpp", *sources)]
        binary = folder / name
        subprocess.run(["g++", f"-I{folder}", *FLAGS, *files, "-o", str(binary)], check=True)

        def run(*words: str, tensors: list[torch.Tensor], **numbers: float) -> bytearray:
            done = subprocess.run(
                [binary, *words, *(f"{name}={number}" for name, number in numbers.items())],
                input=b"".join(map(stored_bytes, tensors)),
                capture_output=True,
            )
            assert done.returncode == 0, done.stderr.decode()
            return bytearray(done.stdout)

        return run

    return compile_program
