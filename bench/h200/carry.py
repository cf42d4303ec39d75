"""What a GPU machine without a network needs beside the repository, made here; no GPU, any torch.

    python -m h200.carry FILES [--jobs 1] [--only library|wheels]

Compiles the CUDA library for Hopper (objects of unchanged sources are kept, so a second time takes
seconds), checks that it asks for torch's CUDA part, and writes `libglm_exl3_cuda.so.xz` with
`digest`, that of its sources. Fetches the wheels that `h200.prepare` unpacks. What is there and
fits is left alone. Archives of caches that came back from an earlier visit (`jit-*.tar.xz`,
`peer.tar.xz`, `peer-kernels.tar.xz`) and FlashInfer's compiled module (`topk.so.xz`) belong into
FILES, too.
"""

from __future__ import annotations

import argparse
import lzma
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from glm_exl3.ops import ext

WHEELS = ("exllamav3==1.6.5", "marisa_trie==1.4.1", "gguf==0.19.0", "pycountry==26.2.16")
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64")  # fmt: skip
PACKED = f"{ext.LIBRARY_NAME}.xz"


def kept_objects() -> Path:
    """Where objects of earlier builds lie."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "glm_exl3" / "objects"


def needed(library: Path) -> set[str]:
    """Names of the libraries that `library` is loaded with."""
    said = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    )
    lines = [line for line in said.stdout.splitlines() if "(NEEDED)" in line]
    return {line.rpartition("[")[2].rstrip("]") for line in lines}


def library(files: Path, jobs: int) -> None:
    """The library of these sources, packed. Raises SystemExit if it would not load elsewhere."""
    digest, packed = files / "digest", files / PACKED
    known = digest.read_text().strip() if digest.is_file() else ""
    if packed.is_file() and known == ext.source_digest():
        print(f"{packed}: of these sources already")
        return
    digest.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        made = ext.build(Path(folder) / ext.LIBRARY_NAME, (ext.HOPPER,), jobs, kept_objects())
        if ext.TORCH_CUDA not in needed(made):
            raise SystemExit(
                f"{made.name} does not ask for {ext.TORCH_CUDA}: symbols would be missing when it "
                "is loaded; look at the link line of glm_exl3.ops.ext"
            )
        packed.write_bytes(lzma.compress(made.read_bytes(), preset=6))
    digest.write_text(ext.source_digest() + "\n")
    print(f"{packed}: {packed.stat().st_size / 2**20:.1f} MiB, sources {ext.source_digest()}")


def missing(files: Path, wheels: Sequence[str] = WHEELS) -> list[str]:
    """Requirements without a wheel in FILES."""
    return [one for one in wheels if not [*files.glob(f"{one.replace('==', '-')}-*.whl")]]


def download(files: Path, wheels: Sequence[str]) -> list[str]:
    """The command that fetches `wheels`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", "-q", "-d", str(files)]
    return [*command, *(word for one in PLATFORMS for word in ("--platform", one)), *wheels]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what is missing in FILES."""
    parser = argparse.ArgumentParser(prog="python -m h200.carry")
    parser.add_argument("files", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", choices=("library", "wheels"))
    options = parser.parse_args(arguments)
    options.files.mkdir(parents=True, exist_ok=True)
    if options.only != "library":
        lacking = missing(options.files)
        if lacking:
            subprocess.run(download(options.files, lacking), check=True)
        print(f"{len(WHEELS)} wheels, fetched now: {', '.join(lacking) or 'none'}")
    if options.only != "wheels":
        library(options.files, options.jobs)


if __name__ == "__main__":
    main()
