"""A checkpoint folder, judged from its headers alone.

`config.json` names the architecture, the safetensors headers name everything else. Bits and
codebook are read from the tensors; `quantization_config.json` is informative and only checked
against them.
What must stay true: a folder that passes `check_checkpoint` has every tensor its index promises,
every packed matrix is complete and legal, and gate and up of one expert agree in K.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from glm_exl3.format.errors import FormatError
from glm_exl3.format.headers import (
    RELOAD,
    TensorEntry,
    damaged,
    overlapping,
    read_header,
    read_object,
)
from glm_exl3.format.layout import CONVERT, TILE, MatrixLayout, codebook_of, layout_of

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SCALE_NAMES = {"suh": "su", "svh": "sv"}
PACKED_LEAVES = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1")
REQUIRED_TEXT_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "mhc",
    "topk_method",
    "scoring_func",
    "mla_use_nope",
    "indexer_rope_interleave",
    "num_nextn_predict_layers",
)
"""Keys vLLM 0.33 reads from the text configuration without a default."""
TARGET_ARCHITECTURES = ("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM")


@dataclass(frozen=True)
class CheckpointIndex:
    """Every tensor of a folder."""

    folder: Path
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def read(cls, folder: Path) -> CheckpointIndex:
        """Index of `folder` from its shards' headers.

        Raises FormatError for a missing or truncated shard, for a tensor the index promises and its
        shard lacks, and for a tensor that a shard holds and the index does not name.
        """
        index_path = folder / INDEX_FILE
        if not index_path.exists():
            return cls(folder, _checked(folder / SINGLE_FILE))
        promised: dict[str, set[str]] = {}
        for name, shard in _weight_map(index_path).items():
            promised.setdefault(shard, set()).add(name)
        tensors: dict[str, TensorEntry] = {}
        for shard in sorted(promised):
            tensors |= _promised(folder / shard, promised[shard])
        return cls(folder, tensors)

    @cached_property
    def modules(self) -> dict[str, MatrixLayout]:
        return exl3_modules(self)


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> name of the shard beside the index."""
    weight_map = read_object(path).get("weight_map")
    if isinstance(weight_map, dict) and weight_map:
        shards = set(map(str, weight_map.values()))
        if all(shard == Path(shard).name for shard in shards):
            return {name: str(shard) for name, shard in weight_map.items()}
    raise damaged(
        "index",
        "the index has no weight_map of tensor names to file names",
        "the shards cannot be found",
        path,
    )


def _checked(path: Path) -> dict[str, TensorEntry]:
    entries = read_header(path)
    for name in overlapping(entries):
        raise damaged(
            "shard-header",
            "its bytes overlap another tensor",
            "one of the two would hold the other's weights",
            path,
            name,
        )
    return entries


def _promised(path: Path, promised: set[str]) -> dict[str, TensorEntry]:
    entries = _checked(path)
    for name in sorted(promised - entries.keys()):
        raise damaged(
            "tensor-missing",
            "the index promises the tensor in this shard, the shard lacks it",
            "a weight would stay uninitialised",
            path,
            name,
        )
    for name in sorted(entries.keys() - promised):
        raise damaged(
            "tensor-unindexed",
            "the shard holds a tensor that the index does not name",
            "index and shards belong to different versions of the checkpoint",
            path,
            name,
        )
    return entries


def exl3_modules(index: CheckpointIndex) -> dict[str, MatrixLayout]:
    """Packed modules by name, in name order.

    Raises FormatError for an incomplete set of tensors, an illegal layout or marker, and for gate
    and up of one parent with different K.
    """
    leaves: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in index.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in PACKED_LEAVES:
            leaves.setdefault(module, {})[leaf] = entry
    modules = {name: _module_layout(name, leaves[name]) for name in sorted(leaves)}
    for name, layout in modules.items():
        _check_companions(index, name, layout)
    _compare_gate_and_up(index, modules)
    return modules


def _module_layout(name: str, leaves: Mapping[str, TensorEntry]) -> MatrixLayout:
    any_file = next(iter(leaves.values())).file

    def missing(leaf: str) -> FormatError:
        seen = f"the matrix has {', '.join(sorted(leaves))} but no {leaf}"
        return damaged("tensor-missing", seen, "it cannot be decoded", any_file, f"{name}.{leaf}")

    if "trellis" not in leaves:
        raise missing("trellis")
    trellis = leaves["trellis"]
    _expect_dtype(name, "trellis", trellis, "I16")
    lengths = {}
    for scale, signs in SCALE_NAMES.items():
        if scale in leaves:
            _expect_dtype(name, scale, leaves[scale], "F16")
            lengths[scale] = _vector_length(name, scale, leaves[scale])
        elif signs in leaves:
            _expect_dtype(name, signs, leaves[signs], "I16")
            lengths[scale] = TILE * _vector_length(name, signs, leaves[signs])
        else:
            raise missing(scale)
    markers = {
        kind: _marker(name, kind, leaves[kind]) if kind in leaves else None
        for kind in ("mcg", "mul1")
    }
    file = str(trellis.file)
    codebook = codebook_of(name, markers["mcg"], markers["mul1"], file=file)
    return layout_of(name, trellis.shape, codebook, lengths["suh"], lengths["svh"], file=file)


def _check_companions(index: CheckpointIndex, name: str, layout: MatrixLayout) -> None:
    """A packed matrix has no dense twin, and its bias covers its outputs."""
    dense, bias = index.tensors.get(f"{name}.weight"), index.tensors.get(f"{name}.bias")
    if dense is not None:
        raise FormatError(
            code="packed-and-dense",
            seen="the matrix is stored packed and dense",
            why="the two may differ and only one can be served",
            fix=CONVERT,
            file=str(dense.file),
            tensor=f"{name}.weight",
        )
    if bias is not None and bias.shape != (layout.out_features,):
        raise damaged(
            "bias",
            f"the bias has shape {list(bias.shape)} for {layout.out_features} outputs",
            "bias and trellis belong to different matrices",
            bias.file,
            f"{name}.bias",
        )


def _marker(name: str, kind: str, entry: TensorEntry) -> int:
    try:
        return entry.read_scalar()
    except FormatError as error:
        raise error.at(tensor=f"{name}.{kind}") from error


def _expect_dtype(name: str, leaf: str, entry: TensorEntry, dtype: str) -> None:
    if entry.dtype != dtype:
        raise damaged(
            "dtype",
            f"the dtype is {entry.dtype}, not {dtype}",
            "the bits mean something else",
            entry.file,
            f"{name}.{leaf}",
        )


def _vector_length(name: str, leaf: str, entry: TensorEntry) -> int:
    if len(entry.shape) != 1:
        raise damaged(
            "scales",
            f"the shape is {list(entry.shape)}, not one dimension",
            "scales are one number per channel",
            entry.file,
            f"{name}.{leaf}",
        )
    return entry.shape[0]


def _compare_gate_and_up(index: CheckpointIndex, modules: Mapping[str, MatrixLayout]) -> None:
    for name, gate in modules.items():
        if not name.endswith(".gate_proj"):
            continue
        other = name.removesuffix("gate_proj") + "up_proj"
        up = modules.get(other)
        if up is not None and (up.last_dim, up.codebook) != (gate.last_dim, gate.codebook):
            raise FormatError(
                code="gate-up",
                seen=f"up has K={up.bits:g} {up.codebook.value}, "
                f"gate has K={gate.bits:g} {gate.codebook.value}",
                why="one kernel reads both with the same K and codebook",
                fix=CONVERT,
                file=str(index.tensors[f"{other}.trellis"].file),
                tensor=f"{other}.trellis",
            )


@dataclass(frozen=True)
class CheckpointReport:
    """What a sound folder holds: packed modules by name, bytes of all tensors, average bits."""

    folder: Path
    architecture: str
    modules: Mapping[str, MatrixLayout]
    total_bytes: int
    bits_per_weight: float


def check_config(folder: Path) -> dict[str, Any]:
    """`config.json` of `folder`. Raises FormatError when a key that vLLM needs is missing."""
    path = folder / "config.json"
    config = read_object(path)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise _lacks(path, "architectures")
    if architectures[0] in TARGET_ARCHITECTURES:
        text = config.get("text_config", config)
        if not isinstance(text, dict):
            raise _lacks(path, "text_config")
        for key in REQUIRED_TEXT_KEYS:
            if key not in text:
                raise _lacks(path, key)
    return config


def _lacks(path: Path, key: str) -> FormatError:
    return FormatError(
        code="config-key",
        seen=f"the configuration lacks the key {key!r}",
        why="vLLM 0.33 reads it without a default",
        fix="take config.json from the original model and add its quantization_config",
        file=str(path),
    )


def check_checkpoint(folder: Path) -> CheckpointReport:
    """Judge `folder` from its headers. Raises FormatError that names file, tensor and cause."""
    config = check_config(folder)
    index = CheckpointIndex.read(folder)
    modules = exl3_modules(index)
    _compare_storage(folder, index)
    weights = sum(m.in_features * m.out_features for m in modules.values())
    packed_bits = sum(m.in_features * m.out_features * m.bits for m in modules.values())
    return CheckpointReport(
        folder=folder,
        architecture=str(config["architectures"][0]),
        modules=modules,
        total_bytes=total_bytes(index.tensors.values()),
        bits_per_weight=packed_bits / weights if weights else 0.0,
    )


def total_bytes(entries: Iterable[TensorEntry]) -> int:
    return sum(entry.stop - entry.start for entry in entries)


def _compare_storage(folder: Path, index: CheckpointIndex) -> None:
    """Tensors that quantization_config.json promises must exist with the promised shape."""
    path = folder / "quantization_config.json"
    if not path.exists():
        return
    for name, shape in _promised_shapes(path):
        entry = index.tensors.get(name)
        if entry is None or list(entry.shape) != shape:
            found = "absent" if entry is None else f"of shape {list(entry.shape)}"
            raise damaged(
                "storage",
                f"the tensor is {found}, {path.name} promises {shape}",
                "metadata and weights belong to different versions of the checkpoint",
                path if entry is None else entry.file,
                name,
            )


def _promised_shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    storage = read_object(path).get("tensor_storage") or {}
    try:
        for module in storage.values():
            for name, promised in (module.get("stored_tensors") or {}).items():
                yield str(name), [int(size) for size in promised["shape"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            code="json",
            seen=f"tensor_storage is malformed ({error!r})",
            why="it may have been written by another tool",
            fix=f"{RELOAD}, or delete it: the weights do not need it",
            file=str(path),
        ) from error
