"""What the files of a model must be: names, sizes, hashes. Completeness is never a marker.

A manifest comes from the hub's metadata of one commit, or, for a folder that was never on the hub,
from its first full hash (`origin` says which, since the second kind only proves that nothing
changed since). A folder is complete when `verify` finds no problem, and at no other time, so a
download or copy that was killed anywhere cannot look complete.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from glm_launch.files import replace_text
from glm_launch.nodes.probes import verify as program
from glm_launch.nodes.ssh import LocalShell, Shell

SCHEMA = 1
DAY_S = 86_400.0
VERIFY_TIMEOUT_S = 3600.0
WANTED = re.compile(r"\.(safetensors|json|jinja|txt|model|tiktoken)$")


@dataclass(frozen=True)
class Entry:
    """One file: `hash` is `sha256:HEX` or `git-sha1:HEX`."""

    name: str
    size: int
    hash: str


@dataclass(frozen=True)
class Problem:
    """Why one file is not what the manifest says: missing, size, content or unreadable."""

    name: str
    kind: str
    seen: str

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}"


@dataclass(frozen=True)
class Manifest:
    """Files of one revision, ordered by name."""

    repo: str
    revision: str
    origin: Literal["hub", "first hash"]
    files: tuple[Entry, ...]

    @property
    def digest(self) -> str:
        """Hash of names and contents; equal weights have equal digests, wherever they came from."""
        text = "\n".join(f"{entry.name} {entry.size} {entry.hash}" for entry in self.files)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.files)

    def of(self, names: Iterable[str]) -> tuple[Entry, ...]:
        wanted = set(names)
        return tuple(entry for entry in self.files if entry.name in wanted)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1))

    @classmethod
    def load(cls, path: Path) -> Manifest | None:
        """The stored manifest; None when there is none that can be read."""
        try:
            value = json.loads(path.read_text())
            if value["schema"] != SCHEMA:
                return None
            files = tuple(Entry(**entry) for entry in value["files"])
            return cls(value["repo"], value["revision"], value["origin"], files)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def of_hub(repo: str, revision: str, siblings: Iterable[Any]) -> Manifest:
    """From the hub's file metadata: sha256 of large files, git blob hash of small ones.

    `siblings` have `rfilename`, `size`, `blob_id` and `lfs` (with `sha256`). Pickle files and
    everything else that the engine does not read are left out.
    """
    files = []
    for one in siblings:
        if not WANTED.search(one.rfilename) or one.size is None:
            continue
        value = f"sha256:{one.lfs.sha256}" if one.lfs else f"git-sha1:{one.blob_id}"
        files.append(Entry(one.rfilename, one.size, value))
    return Manifest(repo, revision, "hub", tuple(sorted(files, key=lambda entry: entry.name)))


def of_folder(folder: Path) -> Manifest:
    """The first full hash of a local folder."""
    names = sorted(
        path for path in folder.rglob("*") if path.is_file() and WANTED.search(path.name)
    )
    files = []
    for path in names:
        size = path.stat().st_size
        hashed = program.digest(path, size, "sha256")
        files.append(Entry(path.relative_to(folder).as_posix(), size, f"sha256:{hashed}"))
    return Manifest(str(folder), "local", "first hash", tuple(files))


@dataclass(frozen=True)
class Verified:
    """The outcome of one verification; `hashed_bytes` is what had to be read."""

    problems: tuple[Problem, ...]
    hashed_bytes: int


def verify(
    manifest: Manifest,
    folder: str,
    cache: str,
    *,
    shell: Shell | None = None,
    full: bool = False,
    rehash_days: float = 30.0,
    sizes_only: bool = False,
) -> Verified:
    """Compare `folder` on a node with the manifest; raises OSError when the program cannot run.

    `sizes_only` reads no contents: it tells what is still to come, not what is good.
    """
    request = {
        "folder": folder, "cache": cache, "full": full, "max_age_s": rehash_days * DAY_S,
        "files": [asdict(entry) for entry in manifest.files], "sizes_only": sizes_only,
    }  # fmt: skip
    if shell is None or isinstance(shell, LocalShell):
        answer = program.verify(request)
    else:
        script = Path(program.__file__).read_text().replace("sys.stdin.read()", _quoted(request))
        done = shell.run(["python3", "-"], stdin=script, timeout_s=VERIFY_TIMEOUT_S)
        if not done.ok:
            raise OSError(f"{shell.name}: {done.err.strip()[-300:] or f'exit code {done.code}'}")
        answer = json.loads(done.out)
    problems = tuple(Problem(**problem) for problem in answer["problems"])
    return Verified(problems, int(answer["hashed_bytes"]))


def _quoted(request: object) -> str:
    """The request as a Python literal: it may be longer than an argument can be."""
    return repr(json.dumps(request))


def summary(problems: Sequence[Problem], limit: int = 5) -> str:
    """The first problems and how many more there are."""
    said = "; ".join(map(str, problems[:limit]))
    more = len(problems) - limit
    return f"{said}; and {more} more" if more > 0 else said
