"""What is kept of a donor of output projections: which tensors, whence, and their hashes.

A donor is another checkpoint of the same model; only the `o_proj` tensors of some layers are taken
from it. `donor.json` lies beside one safetensors file per tensor. The fetching side writes it, the
ranks read it; both use this module, so neither can know more than the other. A record is complete
when every tensor has a hash, and a tensor is used only after its bytes had that hash.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.headers import read_header, read_object

SCHEMA = 1
RECORD = "donor.json"
FETCH = "./start.sh ablit fetch"
GEOMETRY = ("hidden_size", "num_hidden_layers", "layer_types")
OUTPUT = re.compile(r"(?:^|\.)layers\.(\d+)\.(mtp_block\.)?self_attn\.o_proj(?:\.weight)?$")
_PARTS = re.compile(r"^(\d+)(?:-(\d+))?$")


class EditError(GlmExl3Error):
    """A weight edit or steering that cannot be done as asked; nothing is edited then."""


def geometry_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first key of `GEOMETRY` in which two models differ, or None.

    Of layers, only which are linear counts: libraries spell the other kinds in several ways.
    """
    for key in GEOMETRY:
        if _spelled(key, one.get(key)) != _spelled(key, other.get(key)):
            return key
    return None


def _spelled(key: str, value: Any) -> Any:
    if key == "layer_types" and isinstance(value, list | tuple):
        return [kind == "linear_attention" for kind in value]
    return value


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer indices of `15-45` or `3,7-9`, in order. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _PARTS.match(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > 4096:
            raise ValueError(f"{part!r} is no layer or range of layers such as 15-45")
        found.update(range(first, last + 1))
    if not found:
        raise ValueError("no layer is named")
    return tuple(sorted(found))


def show_layers(layers: Sequence[int]) -> str:
    """The inverse of `parse_layers`: runs as `first-last`."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def output_layer(name: str, hidden_layers: int) -> int | None:
    """The layer whose output projection a module or tensor is, or None for anything else.

    Layers from `hidden_layers` on are the MTP block's, and only under its name: a drafter's layers
    are counted on behind the target's and are no part of it.
    """
    match = OUTPUT.search(name)
    if match is None:
        return None
    layer = int(match[1])
    return layer if layer < hidden_layers or match[2] else None


@dataclass(frozen=True)
class DonorTensor:
    """One tensor: `start` and `stop` are its bytes in `file` of the donor, `etag` that file's.

    `sha256` is over the tensor's bytes and empty until all of them arrived.
    """

    layer: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    etag: str
    start: int
    stop: int
    sha256: str = ""

    @property
    def bytes(self) -> int:
        return self.stop - self.start

    @property
    def stored(self) -> str:
        """Name of the file that keeps it here."""
        return f"layer-{self.layer}.safetensors"


@dataclass(frozen=True)
class Donor:
    """A donor at one commit. `geometry` is what its configuration says of `GEOMETRY`."""

    repo: str
    revision: str
    geometry: Mapping[str, Any]
    tensors: tuple[DonorTensor, ...]

    @property
    def complete(self) -> bool:
        return bool(self.tensors) and all(tensor.sha256 for tensor in self.tensors)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(tensor.layer for tensor in self.tensors)

    @property
    def digest(self) -> str:
        """Short hash of all contents; empty while incomplete."""
        if not self.complete:
            return ""
        rows = [[t.layer, t.dtype, list(t.shape), t.sha256] for t in self.tensors]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def with_hash(self, layer: int, sha256: str) -> Donor:
        changed = (replace(t, sha256=sha256) if t.layer == layer else t for t in self.tensors)
        return replace(self, tensors=tuple(changed))

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], path: Path) -> Donor:
        """Raises EditError for anything that `as_json` did not write."""
        try:
            if value["schema"] != SCHEMA:
                raise ValueError(f"schema {value['schema']}")
            tensors = tuple(
                DonorTensor(**{**tensor, "shape": tuple(tensor["shape"])})
                for tensor in value["tensors"]
            )
            repo, revision = str(value["repo"]), str(value["revision"])
            return cls(repo, revision, dict(value["geometry"]), tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise EditError(
                code="donor-record",
                seen=f"{path} is no record of a donor ({error!r})",
                why="it tells which bytes may replace weights",
                fix=f"remove the folder and fetch again: {FETCH}",
            ) from error

    @classmethod
    def load(cls, folder: Path) -> Donor | None:
        """The record of a folder, or None where there is none. Raises EditError, FormatError."""
        path = folder / RECORD
        return cls.from_json(read_object(path), path) if path.is_file() else None

    @classmethod
    def require(cls, folder: Path) -> Donor:
        """The record of a folder with every tensor. Raises EditError, FormatError."""
        donor = cls.load(folder)
        if donor is None or not donor.complete:
            raise EditError(
                code="donor-missing",
                seen=f"{folder} holds {'an incomplete' if donor else 'no'} donor",
                why="a transplant needs its tensors, and no other edit stands in for it",
                fix=FETCH,
            )
        return donor


def read_tensor(folder: Path, tensor: DonorTensor) -> bytes:
    """The bytes of a fetched tensor. Raises EditError or FormatError unless they are the donor's.

    The file's header is compared with the record and the bytes with their hash, each time.
    """

    def refuse(seen: str) -> EditError:
        return EditError(
            code="donor-tensor",
            seen=f"{folder / tensor.stored}: {seen}",
            why="other bytes than the donor's would replace weights",
            fix=f"fetch it again: {FETCH}",
        )

    if not tensor.sha256 or not (folder / tensor.stored).is_file():
        raise refuse("not fetched yet")
    entry = read_header(folder / tensor.stored).get(tensor.name)
    if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
        raise refuse(f"does not hold {tensor.name} as {tensor.dtype} {list(tensor.shape)}")
    data = entry.read()
    if hashlib.sha256(data).hexdigest() != tensor.sha256:
        raise refuse("its bytes do not have the recorded hash")
    return data
