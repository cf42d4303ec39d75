"""Safetensors headers, read without loading a weight.

A safetensors file is an 8-byte little-endian header length, a JSON header and the tensors' bytes.
Everything that can be wrong with a download (missing, cut short, foreign) shows here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm_exl3.format.errors import FormatError

MAX_HEADER_BYTES = 512 << 20
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
RELOAD = "download the file again"


def damaged(code: str, seen: str, why: str, path: Path, tensor: str | None = None) -> FormatError:
    """The error about a file, or a tensor in it, that may be sound where it came from."""
    return FormatError(code=code, seen=seen, why=why, fix=RELOAD, file=str(path), tensor=tensor)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: file, safetensors dtype name, shape, byte range [start, stop) in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self) -> bytes:
        """The tensor's bytes."""
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            return stream.read(self.stop - self.start)

    def read_scalar(self) -> int:
        """Value of a one-element int32 tensor. Raises FormatError for anything else."""
        data = self.read()
        if self.dtype not in {"I32", "U32"} or len(data) != 4:
            raise damaged(
                "marker",
                f"a marker must be one int32, found {self.dtype} {list(self.shape)}",
                "the codebook of the matrix is unknown",
                self.file,
            )
        return int(struct.unpack("<i", data)[0])


def read_json(path: Path) -> Any:
    """Parsed JSON of `path`. Raises FormatError when it is missing, truncated or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise damaged(
            "file-missing", "the file does not exist", "the checkpoint is incomplete", path
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise damaged(
            "json", f"the file is not readable JSON ({error})", "it may have been cut short", path
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """Parsed JSON object of `path`. Raises FormatError as `read_json` does, or for another kind."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise damaged(
            "json",
            f"the file holds a JSON {type(content).__name__}, not an object",
            "it is not the file its name says",
            path,
        )
    return content


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensors of one file. Raises FormatError for a missing, truncated or inconsistent file."""

    def refuse(code: str, seen: str, tensor: str | None = None) -> FormatError:
        return damaged(code, seen, "the weights in it cannot be trusted", path, tensor)

    if not path.is_file():
        raise refuse("shard-missing", "the shard does not exist")
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
        if length is None or length > min(MAX_HEADER_BYTES, size - 8):
            raise refuse("shard-truncated", f"the shard ends inside its header ({size} bytes)")
        try:
            header = json.loads(stream.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise refuse("shard-header", f"the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise refuse("shard-header", "the header is no JSON object")
    entries = {
        name: _entry(path, name, fields, 8 + length, refuse)
        for name, fields in header.items()
        if name != "__metadata__"
    }
    end = max((entry.stop for entry in entries.values()), default=8 + length)
    if end > size:
        raise refuse("shard-truncated", f"the shard has {size} bytes, its header needs {end}")
    if end < size:
        raise refuse("shard-size", f"the shard has {size} bytes, its header accounts for {end}")
    return entries


def _entry(path: Path, name: str, fields: Any, base: int, refuse: Any) -> TensorEntry:
    try:
        dtype, shape = str(fields["dtype"]), tuple(int(size) for size in fields["shape"])
        start, stop = (base + int(offset) for offset in fields["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise refuse("shard-header", "the header entry is malformed", name) from error
    items = 1
    for extent in shape:
        items *= extent
    expected = items * ITEM_BYTES.get(dtype, 0)
    legal = dtype in ITEM_BYTES and min(shape, default=0) >= 0 and start >= base
    if not legal or stop - start != expected:
        raise refuse(
            "shard-header", f"{dtype} {list(shape)} does not fill {stop - start} bytes", name
        )
    return TensorEntry(path, dtype, shape, start, stop)


def overlapping(entries: dict[str, TensorEntry]) -> Iterator[str]:
    """Names of tensors whose bytes overlap an earlier tensor of the same file."""
    previous_stop = -1
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.start < previous_stop and entry.stop > entry.start:
            yield name
        previous_stop = max(previous_stop, entry.stop)
