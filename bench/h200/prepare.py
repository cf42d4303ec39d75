"""What measurements need before they start; all of it runs on the CPU.

    python -m h200.prepare library|caches|flashinfer FILES WORK
    python -m h200.prepare site|folders|tiny FILES WORK
    python -m h200.prepare peer-kernels|peer-package FILES WORK

FILES is a folder that was carried along (`h200.carry` makes it): the CUDA library with the digest
of its sources, since another one is not taken, wheels, and caches of an earlier visit. What is
missing is built, which takes minutes; the peer needs its wheel.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from h200 import caches

WHEEL = "exllamav3-1.6.5-py3-none-any.whl"
CUT_LAYERS = 12
RESERVED_CORES = 12
FOLDERS = {
    "full": ("--family", "full", "--drafter", "{drafter}"),
    "cut": ("--family", "full", "--layers", str(CUT_LAYERS)),
    "pair": ("--family", "tr3"),
}
LOAD = "import sys, torch; torch.ops.load_library(sys.argv[1])"


def carried(files: Path, name: str) -> bytes | None:
    """The library that was carried along, packed or not."""
    packed, plain = files / f"{name}.xz", files / name
    if packed.is_file():
        return lzma.decompress(packed.read_bytes())
    return plain.read_bytes() if plain.is_file() else None


def library(files: Path, work: Path) -> None:
    """The CUDA library of these sources in the cache, carried or built now; and that it loads.

    Raises SystemExit where it does not: it is taken away again, and nothing should go on.
    """
    from glm_exl3.ops import ext

    digest, wanted = files / "digest", ext.cached_library()
    if ext.find_library() is None and digest.is_file():
        data = carried(files, ext.LIBRARY_NAME)
        if data is not None and digest.read_text().strip() == ext.source_digest():
            wanted.parent.mkdir(parents=True, exist_ok=True)
            wanted.write_bytes(data)
        else:
            print(f"{files} holds no library of these sources: it is built", flush=True)
    if ext.find_library() is None:
        ext.build(architectures=(ext.HOPPER,), jobs=os.cpu_count() or 1, kept=work / "objects")
    found = ext.find_library()
    loaded = subprocess.run([sys.executable, "-c", LOAD, str(found)], check=False)
    if loaded.returncode:
        wanted.unlink(missing_ok=True)
        raise SystemExit(
            f"{found} does not load (above), so no kernel runs: make it again with h200.carry"
        )
    print(found, ext.source_digest())


def restored(files: Path, work: Path) -> None:
    """Compiled kernels of an earlier visit in the folders where engines look for them."""
    print(caches.restore(files, work, os.environ), "files in the caches")


def flashinfer(files: Path, _work: Path) -> None:
    """FlashInfer's module for DFlash2's choice of tokens: carried, or compiled for minutes."""
    from flashinfer.jit.topk import gen_topk_module

    module = gen_topk_module()
    data = carried(files, f"{module.name}.so")
    if data is not None:
        module.aot_path.parent.mkdir(parents=True, exist_ok=True)
        module.aot_path.write_bytes(data)
    print("carried" if module.is_aot else "compiled here", module.build_and_load())


def site(files: Path, work: Path) -> None:
    """All wheels but the peer's below WORK/site; as archives they would lose their data files."""
    target, staged = work / "site", work / "site.new"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    for one in sorted(files.glob("*.whl")):
        if one.name != WHEEL:
            zipfile.ZipFile(one).extractall(staged)
    shutil.rmtree(target, ignore_errors=True)
    staged.rename(target)
    print(*sorted(path.name for path in target.glob("*.dist-info")))


def tiny(_files: Path, work: Path) -> None:
    """The tiny checkpoint and its drafter, for all programs that compare its text."""
    from e2e.gpu_text import tiny_folders

    print(*tiny_folders(work / "tiny"))


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


def folders(_files: Path, work: Path) -> None:
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
    target = work / caches.PEER_KERNELS
    if target.exists() or caches.unpack(files / "peer-kernels.tar.xz", work):
        (work / "peer-kernels.packed").touch()
    else:
        failures = build(wheel(files), target, "9.0", max(1, cores() // 2))
        print("\n".join(failures))


def imports(env: dict[str, str]) -> int:
    """Import the peer's extension, which compiles it where it is not there; the exit status."""
    command = [sys.executable, "-c", "import exllamav3.ext"]
    return subprocess.run(command, check=False, env=env).returncode


def peer_package(files: Path, work: Path) -> None:
    """The peer's package under WORK/peer and its extension: carried, or compiled by its import."""
    target = work / "peer"
    if not target.exists():
        staged = work / "peer.new"
        zipfile.ZipFile(wheel(files)).extractall(staged)
        staged.rename(target)
    env = {**os.environ, "MAX_JOBS": str(cores()), "TORCH_CUDA_ARCH_LIST": "9.0"}
    env["PYTHONPATH"] = os.pathsep.join([str(target), str(work / "site"), env["PYTHONPATH"]])
    ready = target / f"{caches.PEER_MODULE}.so"
    if caches.unpack(files / "peer.tar.xz", target):
        (work / "peer.packed").touch()
        if imports(env) == 0:
            return
        ready.unlink()
        (work / "peer.packed").unlink()
    if imports(env):
        raise SystemExit("the peer's extension neither loads nor compiles (above)")


STEPS: dict[str, Callable[[Path, Path], None]] = {
    "library": library, "caches": restored, "flashinfer": flashinfer, "site": site,
    "folders": folders, "tiny": tiny, "peer-kernels": peer_kernels, "peer-package": peer_package,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare one thing."""
    parser = argparse.ArgumentParser(prog="python -m h200.prepare")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("files", type=Path)
    parser.add_argument("work", type=Path)
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    STEPS[options.step](options.files, options.work)


if __name__ == "__main__":
    main()
