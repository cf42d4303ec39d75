"""What engines compile at their first start on a machine: kept between visits.

    python -m h200.caches OUT WORK

Writes OUT/jit-0.tar.xz, OUT/jit-1.tar.xz and so on from the folders that FlashInfer, TileLang,
vLLM, torch and Triton compile into, if something was added since they were restored or packed, and
once what the peer compiled: OUT/peer.tar.xz (its extension) and OUT/peer-kernels.tar.xz. None is
larger than what comes back from a visit; what is cheapest to compile again comes last, and what
`MOST_ARCHIVES` do not hold is left out. Carried back in FILES, they are restored by `h200.prepare`.
Objects stay in: FlashInfer asks ninja, which compiles again what it lacks. Triton's groups name
whole paths, so the folders must lie where they lay.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

VARIABLES = {
    "flashinfer": "FLASHINFER_WORKSPACE_BASE",
    "tilelang": "TILELANG_CACHE_DIR",
    "vllm": "VLLM_CACHE_ROOT",
    "torch": "TORCH_EXTENSIONS_DIR",
    "triton": "TRITON_CACHE_DIR",
}
PEER_MODULE, PEER_KERNELS = "exllamav3_ext", "exl3_peer.so"
LEFT_OUT = (".lock", ".log", ".tmp", ".pyc")
LIMIT_BYTES = 15 * 2**20
CHUNK_BYTES = 4 * 2**20  # before xz; compressed side by side
MOST_ARCHIVES = 4  # beside the results and the peer's two: eight files come back from a visit
WHOLE, STAMP = "jit.tar.xz", "jit.stamp"
END = lzma.compress(bytes(2 * tarfile.BLOCKSIZE))
Entry = tuple[str, Path]


def environment(work: Path, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of all caches: those of `env`, others below WORK/jit."""
    return {key: env.get(key) or str(work / "jit" / name) for name, key in VARIABLES.items()}


def entries(env: Mapping[str, str]) -> list[Entry]:
    """Every file worth keeping with its name in the archive, without the peer's build."""
    found = []
    for name, key in VARIABLES.items():
        folder = Path(env[key])
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if path.is_symlink() or not path.is_file() or path.suffix in LEFT_OUT:
                continue
            if PEER_MODULE not in inside.parts:
                found.append((f"{name}/{inside}", path))
    return found


def stamp(kept: Iterable[Entry]) -> str:
    """Changes when files are added, lost or grow."""
    lines = [f"{name} {path.stat().st_size}" for name, path in kept]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def compressed(raw: bytes) -> bytes:
    """xz on all cores where its program is there."""
    if program := shutil.which("xz"):
        return subprocess.run([program, "-T0", "-2", "-c"], input=raw, capture_output=True,
                              check=True).stdout  # fmt: skip
    return lzma.compress(raw, preset=1)


def packed(kept: Iterable[Entry]) -> bytes:
    """A part of an archive: `kept` without the blocks that end it."""
    raw = io.BytesIO()
    tar = tarfile.open(fileobj=raw, mode="w")  # noqa: SIM115 - closing it would write the end
    for name, path in kept:
        info = tar.gettarinfo(path, name)
        info.mtime = int(info.mtime)  # ninja makes again what is newer than its log says
        with path.open("rb") as file:
            tar.addfile(info, file)
    return compressed(raw.getvalue())


def chunks(kept: Iterable[Entry], size: int = CHUNK_BYTES) -> Iterator[list[Entry]]:
    """`kept` in its order in parts of about `size` bytes; files of one folder stay together."""
    part: list[Entry] = []
    for _, group in groupby(kept, lambda one: one[0].rpartition("/")[0]):
        part += group
        if sum(path.stat().st_size for _, path in part) >= size:
            yield part
            part = []
    if part:
        yield part


def pieces(
    kept: Sequence[Entry], limit: int = LIMIT_BYTES, chunk: int = CHUNK_BYTES
) -> list[bytes]:
    """`kept` in as many archives as needed, none larger than `limit` bytes, in its order.

    Every part is compressed once, and xz streams may follow each other in a file. A part that is
    too large alone is left out and named.
    """
    parts = list(chunks(kept, chunk))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        streams = list(pool.map(packed, parts))
    made, room = list[bytes](), limit - len(END)
    for part, stream in zip(parts, streams, strict=True):
        if len(stream) > room:
            print(f"{part[0][0]} and what is beside it, {len(stream) >> 20} MiB packed: left out")
        elif made and len(made[-1]) + len(stream) <= room:
            made[-1] += stream
        else:
            made.append(stream)
    return [one + END for one in made]


def write(target: Path, data: bytes) -> None:
    """`target` whole or not at all."""
    staged = target.with_suffix(".new")
    staged.write_bytes(data)
    staged.replace(target)
    print(f"{target.name}: {len(data) / 2**20:.1f} MiB", flush=True)


def archives(files: Path) -> list[Path]:
    """All archives of compiled kernels in FILES, a whole one of an older visit first."""
    return sorted(files.glob("jit*.tar.xz"), key=lambda path: (path.name != WHOLE, path.name))


def peer_files(work: Path, env: Mapping[str, str]) -> dict[str, Entry]:
    """What the peer compiled here, by the name of its archive."""
    built = sorted(Path(env[VARIABLES["torch"]]).rglob(f"{PEER_MODULE}.so"))
    found = {"peer": (built[0].name, built[0])} if built else {}
    if (work / PEER_KERNELS).is_file():
        found["peer-kernels"] = (PEER_KERNELS, work / PEER_KERNELS)
    return found


def pack(out: Path, work: Path, env: Mapping[str, str]) -> None:
    """Write the archives that are due; WORK remembers which were."""
    kept = entries(env)
    now, before = stamp(kept), work / STAMP
    if kept and (not before.is_file() or before.read_text() != now):
        made = pieces(kept)
        for number, data in enumerate(made[:MOST_ARCHIVES]):
            write(out / f"jit-{number}.tar.xz", data)
            before.write_text(now)
        if len(made) > MOST_ARCHIVES:
            print(f"{len(made) - MOST_ARCHIVES} more archives of compiled kernels: left out")
    for name, entry in peer_files(work, env).items():
        if not (work / f"{name}.packed").exists():
            for data in pieces([entry]):
                write(out / f"{name}.tar.xz", data)
                (work / f"{name}.packed").touch()


def unpack(archive: Path, target: Path) -> bool:
    """Files of `archive` below `target`; False where there is no archive."""
    if not archive.is_file():
        return False
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="tar")
    return True


def restore(files: Path, work: Path, env: Mapping[str, str]) -> int:
    """Put what FILES/jit*.tar.xz hold into the folders; the number of files there then."""
    found = archives(files)
    for archive in found:
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                name, _, inside = member.name.partition("/")
                if name in VARIABLES and inside:
                    member.name = inside
                    tar.extract(member, env[VARIABLES[name]], filter="tar")
    if found:
        (work / STAMP).write_text(stamp(entries(env)))
    return len(entries(env))


def main() -> None:
    out, work = map(Path, sys.argv[1:])
    pack(out, work, environment(work, os.environ))


if __name__ == "__main__":
    main()
