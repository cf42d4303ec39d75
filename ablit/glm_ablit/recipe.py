"""Which tensors of a donor are wanted, and whether it is a donor for this model at all.

The layer map is the identity: layer N of the donor replaces layer N here, so both must have the
same layers of the same kinds. Only plain BF16 matrices are taken, because only those can replace
BF16 weights byte by byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glm_ablit.remote import MissingFileError, Remote
from glm_exl3.format.donor import (
    GEOMETRY,
    Donor,
    DonorTensor,
    EditError,
    geometry_difference,
    output_layer,
    show_layers,
)
from glm_exl3.format.headers import ITEM_BYTES, MAX_HEADER_BYTES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPE = "BF16"


def geometry_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` says of `GEOMETRY`."""
    text = config.get("text_config", config)
    return {key: text.get(key) for key in GEOMETRY}


def check_geometry(donor: Mapping[str, Any], target: Mapping[str, Any], repo: str) -> None:
    """Raise EditError when the donor is not built like the target."""
    key = geometry_difference(donor, target)
    if key:
        raise _unfit(repo, f"{key} is {_short(donor.get(key))}, here {_short(target.get(key))}")


def wanted(layers: Sequence[int], geometry: Mapping[str, Any], with_mtp: bool) -> tuple[int, ...]:
    """The layers, without those of the MTP block where it is left out."""
    return tuple(n for n in layers if with_mtp or n < geometry["num_hidden_layers"])


def outline(
    remote: Remote,
    layers: Sequence[int],
    target: Mapping[str, Any] | None,
    *,
    with_mtp: bool = True,
) -> Donor:
    """The record of a donor with nothing fetched yet.

    `target` is the geometry of the model to edit, None when it is not known here; ranks compare it
    again. Raises EditError, PassingError.
    """
    geometry = geometry_of(remote.read_json("config.json"))
    if target is not None:
        check_geometry(geometry, target, remote.repo)
    hidden_layers = geometry["num_hidden_layers"]
    if not isinstance(hidden_layers, int) or not isinstance(geometry["hidden_size"], int):
        raise _unfit(remote.repo, "its config.json names no layers or no hidden size")
    layers = wanted(layers, geometry, with_mtp)
    files = _files(remote)
    headers = {} if files else {SINGLE: _header(remote, SINGLE)}
    names = _names(files or headers[SINGLE], layers, hidden_layers, remote.repo)
    tensors = []
    for layer in layers:
        name = names[layer]
        file = files.get(name, SINGLE)
        if file not in headers:
            headers[file] = _header(remote, file)
        tensors.append(_tensor(layer, name, file, headers[file], remote, geometry["hidden_size"]))
    return Donor(remote.repo, remote.revision, geometry, tuple(tensors))


def _files(remote: Remote) -> dict[str, str]:
    """File of each tensor; empty when the checkpoint is one file."""
    try:
        return {str(k): str(v) for k, v in remote.read_json(INDEX)["weight_map"].items()}
    except MissingFileError:
        return {}
    except (KeyError, AttributeError) as error:
        raise _unfit(remote.repo, f"{INDEX} has no weight_map") from error


def _names(
    known: Iterable[str], layers: Sequence[int], hidden_layers: int, repo: str
) -> dict[int, str]:
    """The output projection of every wanted layer. The MTP block has a layer of its own here."""
    found: dict[int, list[str]] = {layer: [] for layer in layers}
    for name in known:
        if name.endswith(".self_attn.o_proj.weight"):
            layer = output_layer(name, hidden_layers + 1)
            if layer in found:
                found[layer].append(name)
    missing = [layer for layer, names in found.items() if not names]
    if missing:
        mtp = "; ABLIT_INCLUDE_MTP=0 leaves the MTP block out" if hidden_layers in missing else ""
        raise _unfit(repo, f"no o_proj.weight in layer(s) {show_layers(missing)}{mtp}")
    twice = [names for names in found.values() if len(names) > 1]
    if twice:
        raise _unfit(repo, f"one layer has several output projections: {', '.join(twice[0])}")
    return {layer: names[0] for layer, names in found.items()}


def _header(remote: Remote, file: str) -> dict[str, Any]:
    """The safetensors header of a file, with `__base__`: where its tensors' bytes begin."""
    prefix, answer = remote.read(file, 0, 8)
    length = struct.unpack("<Q", prefix)[0]
    if not 2 <= length <= min(MAX_HEADER_BYTES, answer.total - 8):
        raise _unfit(remote.repo, f"{file} is no safetensors file")
    text, _ = remote.read(file, 8, 8 + length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
    except (ValueError, AttributeError) as error:
        raise _unfit(remote.repo, f"the header of {file} is not JSON ({error})") from error
    return {**header, "__base__": 8 + length, "__total__": answer.total}


def _tensor(
    layer: int, name: str, file: str, header: Mapping[str, Any], remote: Remote, hidden: int
) -> DonorTensor:
    try:
        dtype, shape = header[name]["dtype"], tuple(int(n) for n in header[name]["shape"])
        start, stop = (header["__base__"] + int(n) for n in header[name]["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise _unfit(remote.repo, f"{file} does not hold {name} as its index says") from error
    if dtype != DTYPE:
        raise _unfit(remote.repo, f"{name} is {dtype}, not {DTYPE}")
    fits = len(shape) == 2 and shape[0] == hidden and min(shape) > 0
    size = ITEM_BYTES[DTYPE] * shape[0] * shape[1] if fits else -1
    if stop - start != size or stop > header["__total__"]:
        raise _unfit(remote.repo, f"{name} {list(shape)} does not fit hidden size {hidden}")
    return DonorTensor(layer, name, dtype, shape, file, remote.etags[file], start, stop)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unfit(repo: str, seen: str) -> EditError:
    return EditError(
        code="donor-unfit",
        seen=f"{repo}: {seen}",
        why="its output projections would be other matrices than those they replace",
        fix="name a BF16 donor of the same model in ABLIT_DONOR and ABLIT_DONOR_REVISION",
    )
