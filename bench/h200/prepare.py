"""What measurements need before they start; all of it runs on the CPU.

    python -m h200.prepare library FILES
    python -m h200.prepare folders WORK
    python -m h200.prepare peer-kernels FILES WORK
    python -m h200.prepare peer-package FILES WORK

FILES is a folder that was carried along: `libglm_exl3_cuda.so` with `digest` (that of its sources;
another one is not taken) and `exllamav3-1.6.5-py3-none-any.whl`. What is missing is built, which
takes minutes; the peer needs its wheel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WHEEL = "exllamav3-1.6.5-py3-none-any.whl"
CUT_LAYERS = 12
RESERVED_CORES = 6
FOLDERS = {
    "full": ("--family", "full", "--drafter", "{drafter}"),
    "cut": ("--family", "full", "--layers", str(CUT_LAYERS)),
    "pair": ("--family", "tr3"),
}


def library(files: Path) -> None:
    """The CUDA library of these sources in the cache: the carried one, or one built now."""
    from glm_exl3.ops import ext

    digest = files / "digest"
    wanted = ext.cached_library()
    if ext.find_library() is None and digest.is_file():
        if digest.read_text().strip() == ext.source_digest():
            wanted.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(files / ext.LIBRARY_NAME, wanted)
        else:
            print(f"{files} holds the library of other sources: it is built anew")
    if ext.find_library() is None:
        ext.build(architectures=(ext.HOPPER,), jobs=os.cpu_count() or 1)
    print(ext.find_library(), ext.source_digest())


def write_folder(work: Path, name: str, arguments: Sequence[str]) -> None:
    """One folder of headers; renamed into place when it is whole."""
    target, staged = work / name, work / f"{name}.new"
    if target.exists():
        return
    drafter = str(work / "drafter")
    given = [part.format(drafter=drafter) for part in arguments]
    command = [sys.executable, "-m", "glm_exl3.dummy", *given, "--out", str(staged)]
    subprocess.run(command, check=True)
    staged.rename(target)


def folders(work: Path) -> None:
    """The folders of the random models."""
    work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(FOLDERS)) as pool:
        list(pool.map(lambda item: write_folder(work, *item), FOLDERS.items()))


def wheel(files: Path) -> Path:
    """The peer's wheel. Raises SystemExit where it was not carried along."""
    found = files / WHEEL
    if not found.is_file():
        raise SystemExit(f"no {found}: pip download --no-deps exllamav3==1.6.5 before the visit")
    return found


def cores() -> int:
    """As many as leave some to the measurements beside."""
    return max(1, (os.cpu_count() or 1) - RESERVED_CORES)


def peer_kernels(files: Path, work: Path) -> None:
    """The library behind the peer's column of the kernel table."""
    from kernels.peer.build import build

    work.mkdir(parents=True, exist_ok=True)
    target = work / "exl3_peer.so"
    if not target.exists():
        failures = build(wheel(files), target, "9.0", max(1, cores() // 2))
        print("\n".join(failures))


def peer_package(files: Path, work: Path) -> None:
    """The peer's package under WORK/peer and its extension, compiled by its own import."""
    target = work / "peer"
    if not target.exists():
        staged = work / "peer.new"
        zipfile.ZipFile(wheel(files)).extractall(staged)
        for more in sorted(files.glob("*.whl")):
            if more.name != WHEEL:
                zipfile.ZipFile(more).extractall(staged / "site")
        staged.rename(target)
    env = {**os.environ, "MAX_JOBS": str(cores()), "TORCH_CUDA_ARCH_LIST": "9.0"}
    env["PYTHONPATH"] = os.pathsep.join([str(target), str(target / "site"), env["PYTHONPATH"]])
    subprocess.run([sys.executable, "-c", "import exllamav3.ext"], check=True, env=env)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare one thing."""
    parser = argparse.ArgumentParser(prog="python -m h200.prepare")
    commands = parser.add_subparsers(dest="command", required=True)
    takes = {"library": ("files",), "folders": ("work",)}
    takes |= {"peer-kernels": ("files", "work"), "peer-package": ("files", "work")}
    for name, folders_taken in takes.items():
        command = commands.add_parser(name)
        for folder in folders_taken:
            command.add_argument(folder, type=Path)
    options = parser.parse_args(arguments)
    if options.command == "library":
        library(options.files)
    elif options.command == "folders":
        folders(options.work)
    elif options.command == "peer-kernels":
        peer_kernels(options.files, options.work)
    else:
        peer_package(options.files, options.work)


if __name__ == "__main__":
    main()
