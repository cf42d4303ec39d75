"""Compare a folder with a manifest and print what is wrong, as JSON. Changes only its own cache.

    python3 - REQUEST < verify.py
    REQUEST: {"folder", "files": [{"name", "size", "hash"}], "cache", "max_age_s", "full",
              "sizes_only"}
    prints:  {"problems": [{"name", "kind", "seen"}], "hashed_bytes", "checked"}

A hash is `sha256:HEX` or, for small files of the hub, `git-sha1:HEX` (a git blob). The cache maps
device and inode to size, times and hash: a file whose size, modification and change times are what
they were is not read again, unless `full` is set or its entry is older than `max_age_s`. Any write
moves the change time, so only rot of the medium needs `full`. Runs on Python 3.8.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHUNK = 1 << 22
THREADS = 4
KEPT = 20_000


def digest(path: Path, size: int, kind: str) -> str:
    """`sha256` of the content, or `git-sha1` of the content as a git blob."""
    state = hashlib.sha256() if kind == "sha256" else hashlib.sha1()  # noqa: S324 (git's own hash)
    if kind != "sha256":
        state.update(b"blob %d\0" % size)
    with path.open("rb", buffering=0) as stream:
        while True:
            chunk = stream.read(CHUNK)
            if not chunk:
                return state.hexdigest()
            state.update(chunk)


class Cache:
    """Hashes known from earlier runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hashed_bytes = 0
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            found = {}
        self.entries: dict[str, Any] = found if isinstance(found, dict) else {}

    def hash(self, path: Path, kind: str, oldest: float) -> str:
        before = path.stat()
        key = f"{before.st_dev}:{before.st_ino}:{kind}"
        mark = [before.st_size, before.st_mtime_ns, before.st_ctime_ns]
        entry = self.entries.get(key)
        if isinstance(entry, list) and entry[:3] == mark and entry[4] >= oldest:
            return str(entry[3])
        found = digest(path, before.st_size, kind)
        self.hashed_bytes += before.st_size
        after = path.stat()
        if mark == [after.st_size, after.st_mtime_ns, after.st_ctime_ns]:
            self.entries[key] = [*mark, found, time.time()]
        return found

    def save(self) -> None:
        if not self.hashed_bytes:
            return
        newest = sorted(self.entries.items(), key=lambda item: -item[1][4])[:KEPT]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        draft.write_text(json.dumps(dict(newest)))
        draft.replace(self.path)


def problem(name: str, kind: str, seen: str) -> dict[str, str]:
    return {"name": name, "kind": kind, "seen": seen}


def check(
    folder: Path, entry: dict[str, Any], cache: Cache | None, oldest: float
) -> dict[str, str] | None:
    name, size = str(entry["name"]), int(entry["size"])
    path = folder / name
    try:
        seen = path.stat().st_size
        if seen != size:
            return problem(name, "size", f"{seen} bytes instead of {size}")
        if cache is None:
            return None
        kind, _, wanted = str(entry["hash"]).partition(":")
        found = cache.hash(path, kind, oldest)
    except FileNotFoundError:
        return problem(name, "missing", f"no such file, {size} bytes")
    except OSError as error:
        return problem(name, "unreadable", error.strerror or str(error))
    if found != wanted:
        return problem(name, "content", f"{kind} {found[:16]} instead of {wanted[:16]}")
    return None


def verify(request: dict[str, Any]) -> dict[str, Any]:
    folder = Path(request["folder"]).expanduser()
    if request.get("sizes_only"):
        seen = [check(folder, entry, None, 0.0) for entry in request["files"]]
        left = [one for one in seen if one is not None]
        return {"problems": left, "hashed_bytes": 0, "checked": len(request["files"])}
    cache = Cache(Path(request["cache"]).expanduser())
    oldest = float("inf") if request.get("full") else time.time() - request["max_age_s"]
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda entry: check(folder, entry, cache, oldest), request["files"])
        problems = [one for one in found if one is not None]
    cache.save()
    checked = len(request["files"])
    return {"problems": problems, "hashed_bytes": cache.hashed_bytes, "checked": checked}


if __name__ == "__main__":
    json.dump(verify(json.loads(sys.argv[1] if sys.argv[1:] else sys.stdin.read())), sys.stdout)
