"""All results of a visit in one small archive."""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Sequence
from pathlib import Path

LIMIT_BYTES = 15 * 2**20
LOG_BYTES = 60_000  # of each log its beginning and its end
INNER_BYTES = 12_000  # likewise, of logs that programs keep of their own parts
SUFFIXES = (".json", ".txt", ".xml")


def shortened(data: bytes, ends: int = LOG_BYTES) -> bytes:
    """Both ends of a long log."""
    if len(data) <= 2 * ends:
        return data
    left_out = len(data) - 2 * ends
    return data[:ends] + f"\n... {left_out} bytes ...\n".encode() + data[-ends:]


def contents(folder: Path) -> list[tuple[str, bytes]]:
    """Results first, then logs, the smallest first."""
    results = [p for p in sorted(folder.iterdir()) if p.suffix in SUFFIXES]
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_size)
    return [(path.name, path.read_bytes()) for path in results] + [
        (path.name, shortened(path.read_bytes())) for path in logs
    ]


def inner_logs(work: Path, since: float) -> list[tuple[str, bytes]]:
    """Logs one folder down in `work` that grew since that time (seconds of the epoch)."""
    logs = [path for path in sorted(work.glob("*/*.log")) if path.stat().st_mtime >= since]
    return [
        (f"work/{path.relative_to(work)}", shortened(path.read_bytes(), INNER_BYTES))
        for path in logs
    ]


def archive(entries: list[tuple[str, bytes]]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, data in entries:
            info = tarfile.TarInfo(f"h200/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return lzma.compress(raw.getvalue(), preset=2)


def pack(
    folder: Path, target: Path, more: Sequence[tuple[str, bytes]] = (), limit: int = LIMIT_BYTES
) -> list[str]:
    """Write `target` whole or not at all; the names that had to be left out, largest first."""
    entries, left_out = [*contents(folder), *more], list[str]()
    packed = archive(entries)
    while len(packed) > limit and entries:
        largest = max(entries, key=lambda entry: len(entry[1]))
        entries.remove(largest)
        left_out.append(largest[0])
        packed = archive(entries)
    staged = target.with_suffix(".new")
    staged.write_bytes(packed)
    staged.replace(target)
    return left_out
