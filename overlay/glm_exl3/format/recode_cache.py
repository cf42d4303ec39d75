"""Where matrices recoded to EXL3 are kept, and whether they belong to a checkpoint.

    FOLDER/recoded/exl3-k6-KEY/
        recode.json                      written last: what is complete
        MODULE.safetensors               one per unit of matrices that share their input scales

KEY is a hash of the source (names, shapes and samples of the bytes of every dense matrix), the
rate, the codebook, the encoder's version and the edits that were applied before encoding. Weights
or settings that change name another folder, so a stale cache is never found; a file that is missing
or has another size than the manifest says is an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm_exl3.format.durable import write_whole
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.headers import TensorEntry, read_object
from glm_exl3.format.recode import Recode, digest_of

VERSION = "datafree-1"
CODEBOOK = "mul1"
FOLDER, MANIFEST = "recoded", "recode.json"
SAMPLE_BYTES = 64 << 10
SHARED_INPUT = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Modules of one parent that read the same input and therefore share their input scales."""


@dataclass(frozen=True)
class Made:
    """One unit in the manifest: its file, that file's size and hash, and what edits changed."""

    modules: tuple[str, ...]
    file: str
    size: int
    sha256: str
    edits: Mapping[str, tuple[str, ...]]


def source_digest(entries: Mapping[str, TensorEntry]) -> str:
    """Hash over names, types, shapes and samples of the bytes of these tensors."""
    total = hashlib.sha256()
    for name in sorted(entries):
        entry = entries[name]
        total.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
        for data in _samples(entry):
            total.update(data)
    return total.hexdigest()[:16]


def _samples(entry: TensorEntry) -> Iterable[bytes]:
    """The first, the middle and the last bytes of a tensor."""
    size = entry.stop - entry.start
    places = {0, max(0, size // 2 - SAMPLE_BYTES // 2), max(0, size - SAMPLE_BYTES)}
    with entry.file.open("rb") as stream:
        for place in sorted(places):
            stream.seek(entry.start + place)
            yield stream.read(min(SAMPLE_BYTES, size - place))


def cache_folder(root: Path, recode: Recode, source: str, edits: str) -> Path:
    """The folder of one source and setting below `root`, the checkpoint's folder or the cache's."""
    key = digest_of((VERSION, CODEBOOK, str(recode.bits), source, edits))
    return root / FOLDER / f"exl3-k{recode.bits}-{key}"


def units(modules: Iterable[str]) -> list[tuple[str, ...]]:
    """Modules that are encoded together, in name order."""
    names = set(modules)
    found: list[tuple[str, ...]] = []
    for name in sorted(names):
        parent, _, leaf = name.rpartition(".")
        group = next((group for group in SHARED_INPUT if leaf in group), (leaf,))
        unit = tuple(part for part in (f"{parent}.{x}" if parent else x for x in group)
                     if part in names)  # fmt: skip
        if unit[0] == name:
            found.append(unit)
    return found


def file_name(unit: tuple[str, ...]) -> str:
    return f"{unit[0]}.safetensors"


def read_manifest(folder: Path) -> dict[str, Made]:
    """Complete units by first module; empty where there is no manifest. Raises FormatError."""
    path = folder / MANIFEST
    if not path.exists():
        return {}
    document = read_object(path)
    made = {}
    for unit in document["units"]:
        edits = {module: tuple(names) for module, names in unit["edits"].items()}
        entry = Made(tuple(unit["modules"]), unit["file"], unit["size"], unit["sha256"], edits)
        made[entry.modules[0]] = entry
    return made


def write_manifest(folder: Path, made: Iterable[Made], facts: Mapping[str, Any]) -> None:
    """Replace the manifest as a whole."""
    listed = sorted((asdict(unit) for unit in made), key=lambda unit: unit["file"])
    document = {**facts, "version": VERSION, "codebook": CODEBOOK, "units": listed}
    text = json.dumps(document, indent=1) + "\n"
    write_whole(folder / MANIFEST, lambda draft: draft.write_text(text, encoding="utf-8"))


def check_complete(folder: Path, wanted: Iterable[tuple[str, ...]], recode: Recode) -> list[Made]:
    """The manifest's entries of `wanted` units. Raises GlmExl3Error when one is missing, was made
    of other modules, or has a file of another size."""
    made, complete = read_manifest(folder), []
    wanted = list(wanted)
    for unit in wanted:
        entry = made.get(unit[0])
        if entry is None or entry.modules != unit:
            raise _missing(folder, f"{unit[0]} of {len(wanted)} units is not in it", recode)
        path = folder / entry.file
        size = path.stat().st_size if path.is_file() else None
        if size != entry.size:
            said = "is gone" if size is None else f"has {size} bytes instead of {entry.size}"
            raise _missing(folder, f"{entry.file} {said}", recode)
        complete.append(entry)
    return complete


def _missing(folder: Path, seen: str, recode: Recode) -> GlmExl3Error:
    others = sorted(path.name for path in folder.parent.glob("exl3-*") if path != folder)
    beside = f"; beside it are {', '.join(others)}, made of other weights or settings"
    return GlmExl3Error(
        code="recode-cache",
        seen=f"no complete recoded weights in {folder}: {seen}{beside if others else ''}",
        why=f"DENSE_RECODE={recode} serves matrices that are made once",
        fix="run ./start.sh recode (python -m glm_exl3.recode), which goes on where it stopped",
    )
