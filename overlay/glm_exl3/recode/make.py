"""Encode the dense matrices of a checkpoint, one unit after another.

A unit is written under another name, forced to the disk and renamed, and the manifest follows; a
run that is stopped at any point loses the unit under way. Units that exist already are kept if
their size is the manifest's, with `verify` only if their hash is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from glm_exl3.dummy.folder import write_sparse
from glm_exl3.format.durable import sha256_of, write_whole
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.headers import TensorEntry
from glm_exl3.format.layout import TILE, TILE_ELEMENTS, Codebook
from glm_exl3.format.metadata import check_config
from glm_exl3.format.recode import Recode, flat_name
from glm_exl3.format.recode_cache import (
    CODEBOOK,
    Made,
    file_name,
    read_manifest,
    units,
    write_manifest,
)
from glm_exl3.format.sharding import Cut
from glm_exl3.models.naming import is_mtp
from glm_exl3.ops import library, table
from glm_exl3.quant import edits
from glm_exl3.quant.edits import Placement
from glm_exl3.quant.facts import Facts
from glm_exl3.quant.recode_cache import folder_for, sources
from glm_exl3.ref.datafree import quantize_datafree
from glm_exl3.ref.quantize import Exl3Tensors, split_columns

Step = Callable[[int], None]


@dataclass(frozen=True)
class Work:
    """What one run has to do: units and their tiles, and the manifest's entries that hold."""

    folder: Path
    pending: tuple[tuple[str, ...], ...]
    done: tuple[Made, ...]
    tensors: dict[str, TensorEntry]
    hidden_layers: int

    def tiles(self, unit: tuple[str, ...]) -> int:
        """Tiles of 256 weights in a unit."""
        shapes = [self.tensors[module].shape for module in unit]
        return sum(rows * columns for rows, columns in shapes) // TILE_ELEMENTS

    @property
    def pending_tiles(self) -> int:
        return sum(map(self.tiles, self.pending))


def plan(facts: Facts, recode: Recode, *, verify: bool = False) -> Work:
    """Compare what is asked for with what exists."""
    folder, tensors = folder_for(facts, recode), sources(facts, recode)
    made = read_manifest(folder)
    pending = tuple(
        unit for unit in units(tensors) if not _holds(folder, made.get(unit[0]), unit, verify)
    )
    gone = {unit[0] for unit in pending}
    done = tuple(entry for first, entry in made.items() if first not in gone)
    return Work(folder, pending, done, tensors, hidden_layers(facts))


def _holds(folder: Path, made: Made | None, unit: tuple[str, ...], verify: bool) -> bool:
    if made is None or made.modules != unit:
        return False
    path = folder / made.file
    if not path.is_file() or path.stat().st_size != made.size:
        return False
    return not verify or sha256_of(path) == made.sha256


def run(
    work: Work, recode: Recode, device: torch.device, step: Step, *, headers_only: bool = False
) -> None:
    """Make every pending unit; `step` is told the tiles of each when it is on the disk.

    `headers_only` writes files without weights, for `--load-format exl3_dummy`.
    """
    work.folder.mkdir(parents=True, exist_ok=True)
    made = list(work.done)
    for unit in work.pending:
        path = work.folder / file_name(unit)
        changed: dict[str, tuple[str, ...]] = {}
        if headers_only:
            headers = dict(_headers(work, unit, recode.bits))
            write_whole(path, partial(write_sparse, tensors=headers))
        else:
            encoded, changed = encode_unit(work, unit, recode.bits, device)
            write_whole(path, partial(save_file, encoded))
        digest = "" if headers_only else sha256_of(path)
        made.append(Made(unit, path.name, path.stat().st_size, digest, changed))
        facts = {"bits": recode.bits, "edits": edits.digest_entry()}
        write_manifest(work.folder, made, facts)
        step(work.tiles(unit))


def encode_unit(
    work: Work, unit: tuple[str, ...], bits: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, ...]]]:
    """Checkpoint tensors of one unit, and the edits that changed its modules."""
    row = table.choose(table.Device.of(device))

    def encoder(tiles: torch.Tensor, rate: int, codebook: Codebook) -> torch.Tensor:
        return library.encode(tiles, rate, codebook, row.name)

    weights, changed = [], {}
    for module in unit:
        role = "mtp" if is_mtp(module, work.hidden_layers) else "target"
        weight, names = edited(module, role, _read(work.tensors[module], module).to(device))
        weights.append(weight.t())
        if names:
            changed[module] = names
    joined = torch.cat([weight.to(torch.float32) for weight in weights], dim=1)
    seed = int.from_bytes(hashlib.sha256(unit[0].encode()).digest()[:4], "little")
    packed = quantize_datafree(joined, bits, Codebook(CODEBOOK), seed=seed, encoder=encoder)
    if not bool(torch.isfinite(packed.suh).all() and torch.isfinite(packed.svh).all()):
        raise GlmExl3Error(
            code="recode",
            seen=f"{unit[0]} has scales beyond fp16 after encoding",
            why="the layer would answer NaN",
            fix="leave its group out of DENSE_GROUPS and report the checkpoint",
        )
    parts = split_columns(packed, [weight.shape[1] for weight in weights])
    tensors: dict[str, torch.Tensor] = {}
    for module, part in zip(unit, parts, strict=True):
        tensors |= {name: value.cpu() for name, value in part.state_dict(module).items()}
    return {name: value.clone() for name, value in tensors.items()}, changed


def _read(entry: TensorEntry, module: str) -> torch.Tensor:
    with safe_open(entry.file, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(f"{module}.weight")
    return tensor


def hidden_layers(facts: Facts) -> int:
    """Layers in front of the MTP block, from the checkpoint's configuration."""
    config = check_config(facts.folder)
    return int(config.get("text_config", config)["num_hidden_layers"])


def edited(module: str, role: str, weight: torch.Tensor) -> tuple[torch.Tensor, tuple[str, ...]]:
    """A whole matrix [out, in] behind the registered edits, and the names of those that changed it.

    Raises GlmExl3Error as an edit does while loading.
    """
    out, inputs = weight.shape
    placement = Placement(Cut(0, out, out), Cut(0, inputs, inputs))
    names = []
    for edit in edits.registered():
        if role not in edit.roles or not edit.wants(flat_name(module)):
            continue
        answer = edit.edit(flat_name(module), (out, inputs), weight, placement)
        if answer is not None:
            weight = edits.checked(edit, flat_name(module), weight, answer)
            names.append(edit.name)
    return weight, tuple(names)


def _headers(work: Work, unit: tuple[str, ...], bits: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a unit on the `meta` device, markers excepted."""
    for module in unit:
        rows, columns = work.tensors[module].shape
        with torch.device("meta"):
            trellis = torch.empty(columns // TILE, rows // TILE, TILE * bits, dtype=torch.int16)
            suh = torch.empty(columns, dtype=torch.float16)
            svh = torch.empty(rows, dtype=torch.float16)
        with torch.device("cpu"):
            yield from Exl3Tensors(trellis, suh, svh, Codebook(CODEBOOK)).state_dict(module).items()
