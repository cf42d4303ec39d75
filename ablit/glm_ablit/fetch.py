"""Bring the tensors of an outline into a folder; killed anywhere, it goes on where it stopped.

A tensor arrives in `layer-N.part`, which begins with the header of the finished file, and beside it
`layer-N.state.json` says how many bytes were synced and their hash. A part is continued only if it
still has that hash. When all bytes are there, the hash goes into the record first and the part gets
its final name second, so a file with a final name always has a recorded hash. One process at a time
holds the folder's lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from glm_ablit import recipe
from glm_ablit.remote import PassingError, Remote
from glm_exl3.format.donor import FETCH, RECORD, Donor, DonorTensor, EditError, read_tensor
from glm_exl3.format.durable import alone, sync, write_whole
from glm_exl3.format.errors import GlmExl3Error

SYNC_BYTES = 4 << 20
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Fetched:
    """What a call did: the record, body bytes received, and bytes of tensors that were missing."""

    donor: Donor
    moved: int
    needed: int


def fetch(
    remote: Remote,
    folder: Path,
    layers: Sequence[int],
    target: Mapping[str, Any] | None = None,
    progress: Progress = lambda _done, _total: None,
    sync_bytes: int = SYNC_BYTES,
    *,
    with_mtp: bool = True,
) -> Fetched:
    """Make `folder` hold the wanted tensors of `remote`. Raises EditError.

    `progress` gets bytes that are there and bytes in all. Without `with_mtp` the layers behind the
    hidden ones are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder), remote:
        try:
            donor = _record(remote, folder, layers, target, with_mtp)
            total = sum(tensor.bytes for tensor in donor.tensors)
            sizes = {tensor.layer: _present(folder, tensor) for tensor in donor.tensors}
            needed = total - sum(sizes.values())
            for tensor in donor.tensors:

                def report(done: int, layer: int = tensor.layer) -> None:
                    sizes[layer] = done
                    progress(sum(sizes.values()), total)

                sha256 = _bring(remote, folder, tensor, report, sync_bytes)
                if not tensor.sha256:
                    donor = donor.with_hash(tensor.layer, sha256)
                    _replace(folder / RECORD, donor.as_json())
                _finish(folder, tensor)
                report(tensor.bytes)
        except PassingError as error:
            raise EditError(
                code="donor-unreachable",
                seen=f"{remote.repo}: {error}",
                why="tensors are still missing; what arrived is kept",
                fix=f"go on later with {FETCH}",
            ) from error
    return Fetched(donor, remote.moved, needed)


def verify(folder: Path) -> Donor:
    """The record of a folder whose every byte was read again. Raises EditError, FormatError."""
    donor = Donor.require(folder)
    for tensor in donor.tensors:
        read_tensor(folder, tensor)
    return donor


def progress_of(folder: Path, donor: Donor) -> int:
    """Bytes of the donor's tensors that are there, parts included."""
    return sum(_present(folder, tensor) for tensor in donor.tensors)


def _record(
    remote: Remote,
    folder: Path,
    layers: Sequence[int],
    target: Mapping[str, Any] | None,
    with_mtp: bool,
) -> Donor:
    """The stored record when it is of the same commit and layers; else a new outline.

    A new outline takes over the hashes of tensors that did not change.
    """
    known = Donor.load(folder)
    if known and (known.repo, known.revision) != (remote.repo, remote.revision):
        raise EditError(
            code="donor-other",
            seen=f"{folder} holds {known.repo}@{known.revision}",
            why="tensors of two donors must not be mixed",
            fix="use another folder",
        )
    if known and known.layers == recipe.wanted(layers, known.geometry, with_mtp):
        if target is not None:
            recipe.check_geometry(known.geometry, target, known.repo)
        remote.etags.update({tensor.file: tensor.etag for tensor in known.tensors})
        return known
    donor = recipe.outline(remote, layers, target, with_mtp=with_mtp)
    for old in known.tensors if known else ():
        if replace(old, sha256="") in donor.tensors:
            donor = donor.with_hash(old.layer, old.sha256)
    _replace(folder / RECORD, donor.as_json())
    return donor


def _bring(
    remote: Remote,
    folder: Path,
    tensor: DonorTensor,
    report: Callable[[int], None],
    sync_bytes: int,
) -> str:
    """All bytes of one tensor in its part, or finished already; their hash."""
    if tensor.sha256 and _is_final(folder, tensor):
        try:
            read_tensor(folder, tensor)
            return tensor.sha256
        except GlmExl3Error:
            report(0)
    (folder / tensor.stored).unlink(missing_ok=True)
    part = _Part(folder, tensor, sync_bytes)
    with part.opened():
        for attempt in remote.retrying():
            with attempt:
                _continue(remote, tensor, part, report)
    found = part.hash.hexdigest()
    if tensor.sha256 and found != tensor.sha256:
        part.remove()
        raise EditError(
            code="donor-changed",
            seen=f"{tensor.name} arrived with another hash than at the first time",
            why="one of the two is not what the donor holds",
            fix=f"run {FETCH} again; if it happens again, use another mirror",
        )
    return found


def _continue(
    remote: Remote, tensor: DonorTensor, part: _Part, report: Callable[[int], None]
) -> None:
    first = tensor.start + part.done
    if first == tensor.stop:
        return
    with remote.request(tensor.file, first, tensor.stop) as answer:
        try:
            for piece in answer.pieces(tensor.stop - first):
                part.write(piece)
                remote.moved += len(piece)
                report(part.done)
        finally:
            part.sync()


class _Part:
    """An unfinished tensor: `done` payload bytes, their running `hash`, and what is synced."""

    def __init__(self, folder: Path, tensor: DonorTensor, sync_bytes: int) -> None:
        self.path = folder / f"layer-{tensor.layer}.part"
        self.state = folder / f"layer-{tensor.layer}.state.json"
        self.tensor, self.sync_bytes = tensor, sync_bytes
        self.header = file_header(tensor)
        self.done = 0
        self.hash = hashlib.sha256()
        self._synced = 0
        self._stream: IO[bytes] | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Continue what is there, if it is still what was synced; else begin anew."""
        mode = "r+b" if self._resume() else "w+b"
        with self.path.open(mode) as stream:
            self._stream = stream
            if not self.done:
                self.hash = hashlib.sha256()
                stream.write(self.header)
            stream.seek(len(self.header) + self.done)
            stream.truncate()
            yield

    def _resume(self) -> bool:
        """Whether a part can be continued; sets `done` and `hash`."""
        try:
            state = json.loads(self.state.read_text())
            if state["header"] != hashlib.sha256(self.header).hexdigest():
                return False
            with self.path.open("rb") as stream:
                if stream.read(len(self.header)) != self.header:
                    return False
                left = int(state["done"])
                while left > 0 and (piece := stream.read(min(left, SYNC_BYTES))):
                    self.hash.update(piece)
                    left -= len(piece)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if left or self.hash.hexdigest() != state["sha256"]:
            return False
        self.done = self._synced = int(state["done"])
        return True

    def write(self, piece: bytes) -> None:
        assert self._stream is not None
        self._stream.write(piece)
        self.hash.update(piece)
        self.done += len(piece)
        if self.done - self._synced >= self.sync_bytes:
            self.sync()

    def sync(self) -> None:
        """Bring what was written to the disk, then say so."""
        assert self._stream is not None
        self._stream.flush()
        os.fsync(self._stream.fileno())
        state = {
            "done": self.done,
            "sha256": self.hash.hexdigest(),
            "header": hashlib.sha256(self.header).hexdigest(),
        }
        _replace(self.state, state)
        self._synced = self.done

    def remove(self) -> None:
        self.state.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


def file_header(tensor: DonorTensor) -> bytes:
    """The header of the file that keeps a tensor; safetensors pads it to eight bytes."""
    entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [0, tensor.bytes]}
    about = {"file": tensor.file, "etag": tensor.etag, "start": str(tensor.start)}
    text = json.dumps({"__metadata__": about, tensor.name: entry}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _is_final(folder: Path, tensor: DonorTensor) -> bool:
    path = folder / tensor.stored
    return path.is_file() and path.stat().st_size == len(file_header(tensor)) + tensor.bytes


def _present(folder: Path, tensor: DonorTensor) -> int:
    """Payload bytes of one tensor that need not be asked for again, by size alone."""
    if tensor.sha256 and _is_final(folder, tensor):
        return tensor.bytes
    try:
        state = json.loads((folder / f"layer-{tensor.layer}.state.json").read_text())
        return min(int(state["done"]), tensor.bytes)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _finish(folder: Path, tensor: DonorTensor) -> None:
    """The final name of a tensor whose hash is recorded."""
    part = folder / f"layer-{tensor.layer}.part"
    if part.is_file():
        part.replace(folder / tensor.stored)
        sync(folder)
    (folder / f"layer-{tensor.layer}.state.json").unlink(missing_ok=True)


def _replace(path: Path, value: object) -> None:
    text = json.dumps(value, indent=1)
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def _lock(folder: Path) -> AbstractContextManager[None]:
    refusal = EditError(
        code="donor-busy",
        seen=f"another process is fetching into {folder}",
        why="two writers would spoil each other's parts",
        fix="wait for it",
    )
    return alone(folder / ".lock", lambda: refusal)
