"""The compiled library: where it is, how it is built, whether it can run here.

One shared library holds every CUDA kernel behind `torch.ops.glm_exl3_cuda.*`. It uses libtorch's
stable ABI, so a file built once serves several torch releases. Images carry it beside this package;
elsewhere `build` makes it with nvcc and keeps it in the user's cache under a digest of its sources,
so changed sources never meet an old library. Importing this module does neither. Where torch itself
has no CUDA part, the library is linked against a stand-in of its name, and runs where there is one.

Torch releases before 2.11 are refused: they lack parts of the ABI the library is built against.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from glm_exl3.format.errors import GlmExl3Error

LIBRARY_NAME = "libglm_exl3_cuda.so"
TORCH_CUDA = "libtorch_cuda.so"
SOURCES = Path(__file__).resolve().parent.parent / "csrc"
SHIPPED = Path(__file__).resolve().parent / LIBRARY_NAME
HOPPER = "9.0a"
ARCHITECTURES = ("8.0", HOPPER, "12.0", "12.1")
MINIMUM_CAPABILITY = (8, 0)
MINIMUM_TORCH = (2, 11)
# The ABI the library is compiled against; see torch/headeronly/version.h.
_TARGET_TORCH = "0x020b000000000000"
_INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def source_digest() -> str:
    """Twelve hex digits over the names and contents of all compiled sources."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.c*")) + sorted(SOURCES.glob("*.h")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def cached_library() -> Path:
    """Where a locally built library of these sources belongs."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "glm_exl3" / source_digest() / LIBRARY_NAME


def find_library() -> Path | None:
    """The shipped library, else one built from these very sources, else None."""
    return next((path for path in (SHIPPED, cached_library()) if path.is_file()), None)


def nvcc() -> Path | None:
    """The CUDA compiler of CUDA_HOME or of PATH."""
    home = os.environ.get("CUDA_HOME")
    found = Path(home) / "bin" / "nvcc" if home else None
    if found is None or not found.is_file():
        located = shutil.which("nvcc")
        found = Path(located) if located else None
    return found.resolve() if found else None


def _generate_flags(architectures: tuple[str, ...]) -> list[str]:
    flags = []
    for architecture in architectures:
        number = architecture.replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
    return flags


def _targets(source: Path, architectures: tuple[str, ...]) -> tuple[str, ...]:
    """Warpgroup products run on Hopper only; elsewhere they are compiled just to link."""
    if source.stem.startswith("prefill_k") and HOPPER in architectures:
        return (HOPPER,)
    return architectures


def compile_commands(
    compiler: Path, objects: Path, architectures: tuple[str, ...] = ARCHITECTURES
) -> list[list[str]]:
    """One command per translation unit, writing `objects`/NAME.o."""
    include = Path(torch.__file__).parent / "include"
    shared = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    commands = []
    for source in sorted(SOURCES.glob("*.cu")) + sorted(SOURCES.glob("*.cpp")):
        command = [
            str(compiler),
            *shared,
            "-c",
            str(source),
            "-o",
            str(objects / f"{source.stem}.o"),
        ]
        if source.suffix == ".cu":
            command += _generate_flags(_targets(source, architectures))
        else:
            command += [f"-DTORCH_TARGET_VERSION={_TARGET_TORCH}", "-DUSE_CUDA", f"-I{include}"]
        commands.append(command)
    return commands


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise GlmExl3Error(
            code="extension",
            seen=f"{' '.join(command)} failed: {result.stderr[-2000:]}",
            why="the CUDA kernels are not built without it",
            fix="use CUDA 13.0 with a host compiler it supports, or the prebuilt image",
        )


def included(source: Path) -> list[Path]:
    """`source` and all files beside it that it includes, itself or through others; sorted."""
    found, unread = {source}, [source]
    while unread:
        for name in _INCLUDE.findall(unread.pop().read_bytes()):
            path = source.parent / name.decode()
            if path not in found and path.is_file():
                found.add(path)
                unread.append(path)
    return sorted(found)


@cache
def _compiler_version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout


def object_digest(command: list[str]) -> str:
    """Twelve hex digits over all that an object of `compile_commands` depends on."""
    source = Path(command[command.index("-c") + 1])
    flags = [word for word in command[1:] if "/" not in word]
    digest = hashlib.sha256(" ".join([torch.__version__, *flags]).encode())
    digest.update(_compiler_version(command[0]))
    for path in included(source):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _compile(command: list[str], kept: Path | None) -> Path:
    """The object of `command`: made now, or the one in `kept` of the same inputs."""
    made = Path(command[command.index("-o") + 1])
    if kept is None:
        _run(command)
        return made
    wanted = kept / f"{made.stem}-{object_digest(command)}.o"
    if not wanted.is_file():
        _run(command)
        staged = wanted.with_suffix(f".{os.getpid()}")
        shutil.copyfile(made, staged)
        staged.replace(wanted)
    return wanted


def _torch_folders(compiler: Path, folder: Path) -> list[Path]:
    """Where to link torch from; a CPU torch gets an empty library for its missing CUDA part."""
    library = Path(torch.__file__).parent / "lib"
    if (library / TORCH_CUDA).is_file():
        return [library]
    empty = folder / "empty.cpp"
    empty.touch()
    name = ("-Xlinker", f"-soname={TORCH_CUDA}")
    _run([str(compiler), "-shared", "-cudart", "none", *name, str(empty), "-o",
          str(folder / TORCH_CUDA)])  # fmt: skip
    return [library, folder]


def link_command(
    compiler: Path, linked: Path, objects: list[Path], folders: list[Path]
) -> list[str]:
    """Link `objects` so that loading the library loads torch's CUDA part, used here or not."""
    places = [f"-L{folder}" for folder in folders]
    libraries = ["-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10"]
    command = [str(compiler), "-shared", "-cudart", "static", "-o", str(linked)]
    return [*command, *map(str, objects), *places, *libraries]


def build(
    target: Path | None = None,
    architectures: tuple[str, ...] = ARCHITECTURES,
    jobs: int = 1,
    kept: Path | None = None,
) -> Path:
    """Compile and link all sources into `target` (default: the cache) and return it.

    `kept` is a folder of objects that lasts: only what changed since is compiled. Raises
    GlmExl3Error when nvcc is missing or fails.
    """
    compiler = nvcc()
    if compiler is None:
        raise GlmExl3Error(
            code="extension",
            seen="no nvcc in CUDA_HOME or PATH",
            why="the CUDA kernels must be compiled once for this machine",
            fix="install the CUDA 13.0 toolkit or use the prebuilt image",
        )
    target = target or cached_library()
    for folder in filter(None, (target.parent, kept)):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        commands = compile_commands(compiler, work, architectures)
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(lambda command: _compile(command, kept), commands))
        linked = work / LIBRARY_NAME
        _run(link_command(compiler, linked, sorted(objects), _torch_folders(compiler, work)))
        staged = target.with_suffix(f".{os.getpid()}")
        shutil.copyfile(linked, staged)
        staged.replace(target)
    return target


def _build_once(architectures: tuple[str, ...]) -> Path:
    """Build into the cache, or wait for another process of this machine that is at it."""
    folder = cached_library().parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return find_library() or build(architectures=architectures, jobs=os.cpu_count() or 1)


@cache
def load() -> Path:
    """Register the operators, building the library first where it is missing; idempotent.

    Returns the file loaded. Raises GlmExl3Error when it can be neither found nor built.
    """
    path = find_library()
    if path is None:
        major, minor = torch.cuda.get_device_capability()
        name = f"{major}.{minor}" + ("a" if (major, minor) == (9, 0) else "")
        path = _build_once((name,))
    torch.ops.load_library(str(path))
    return path


def operators() -> Any:
    """`torch.ops.glm_exl3_cuda`, its library loaded. Raises what `load` raises."""
    load()
    return torch.ops.glm_exl3_cuda


def refusal(capability: tuple[int, int] | None) -> str | None:
    """Why the compiled kernels cannot run on a device of `capability`, or None."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < MINIMUM_TORCH:
        return f"torch {torch.__version__} is older than {MINIMUM_TORCH[0]}.{MINIMUM_TORCH[1]}"
    if capability is None or capability < MINIMUM_CAPABILITY:
        return f"compute capability {capability} is below 8.0"
    if find_library() is None and nvcc() is None:
        return "the library is not built and there is no nvcc to build it"
    return None


@cache
def runs_on(device: torch.device, needed: tuple[int, int] = MINIMUM_CAPABILITY) -> bool:
    """Whether kernels that need the capability `needed` run on `device`, built at first use or
    before."""
    if device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability >= needed and refusal(capability) is None
