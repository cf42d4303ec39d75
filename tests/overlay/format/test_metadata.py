"""A sound folder passes; every damage that headers show is one error naming file and tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm_exl3.format.errors import FormatError
from glm_exl3.format.headers import read_header
from glm_exl3.format.layout import MUL1_MARKER, Codebook, MatrixLayout
from glm_exl3.format.metadata import REQUIRED_TEXT_KEYS, CheckpointIndex, check_checkpoint

from .conftest import EXPERT, SHARDS, Checkpoint, Tensor, packed, shard_bytes

GATE, UP, DOWN = (f"{EXPERT}.{name}_proj" for name in ("gate", "up", "down"))
INDEX = "model.safetensors.index.json"


def refused(checkpoint: Checkpoint) -> FormatError:
    with pytest.raises(FormatError) as caught:
        check_checkpoint(checkpoint.folder)
    return caught.value


def test_a_sound_folder_is_described(checkpoint: Checkpoint) -> None:
    report = check_checkpoint(checkpoint.write())
    assert report.modules == {
        DOWN: MatrixLayout(256, 128, 64, Codebook.MCG),
        GATE: MatrixLayout(128, 256, 64, Codebook.MCG),
        UP: MatrixLayout(128, 256, 64, Codebook.MCG),
    }
    assert report.bits_per_weight == 4
    assert report.total_bytes == sum(len(t.data) for t in checkpoint.tensors.values())


def test_a_single_file_needs_no_index(checkpoint: Checkpoint) -> None:
    folder = checkpoint.write()
    for name in (*SHARDS, INDEX):
        (folder / name).unlink()
    (folder / "model.safetensors").write_bytes(shard_bytes(checkpoint.tensors))
    assert len(check_checkpoint(folder).modules) == 3


def test_sign_words_count_sixteen_channels_each(checkpoint: Checkpoint) -> None:
    del checkpoint.tensors[f"{DOWN}.suh"]
    checkpoint.tensors[f"{DOWN}.su"] = Tensor("I16", [16])
    assert DOWN in check_checkpoint(checkpoint.write()).modules
    checkpoint.tensors[f"{DOWN}.su"] = Tensor("I16", [8])
    checkpoint.write()
    assert refused(checkpoint).tensor == f"{DOWN}.suh"


def set_shape(leaf: str, dtype: str, *shape: int) -> Callable[[Checkpoint], None]:
    def edit(checkpoint: Checkpoint) -> None:
        checkpoint.tensors[leaf] = Tensor(dtype, list(shape))

    return edit


def replace_up(last_dim: int) -> Callable[[Checkpoint], None]:
    def edit(checkpoint: Checkpoint) -> None:
        for leaf, tensor in packed(128, 256, last_dim).items():
            checkpoint.tensors[f"{UP}.{leaf}"] = tensor

    return edit


def drop(leaf: str) -> Callable[[Checkpoint], None]:
    def edit(checkpoint: Checkpoint) -> None:
        del checkpoint.tensors[leaf]

    return edit


def set_marker(leaf: str, value: int) -> Callable[[Checkpoint], None]:
    def edit(checkpoint: Checkpoint) -> None:
        checkpoint.tensors[leaf] = Tensor("I32", [], struct.pack("<I", value))

    return edit


DAMAGED_TENSORS = {
    "rank of the trellis": (set_shape(f"{DOWN}.trellis", "I16", 16, 512), "trellis-shape", None),
    "K out of range": (set_shape(f"{DOWN}.trellis", "I16", 16, 8, 144), "bits", None),
    "K of zero": (set_shape(f"{DOWN}.trellis", "I16", 16, 8, 0), "trellis-shape", None),
    "half rate without mul1": (set_shape(f"{DOWN}.trellis", "I16", 16, 8, 40), "bits", None),
    "k no multiple of 128": (set_shape(f"{DOWN}.trellis", "I16", 15, 8, 64), "dims", None),
    "n no multiple of 128": (set_shape(f"{DOWN}.trellis", "I16", 16, 9, 64), "dims", None),
    "dtype of the trellis": (set_shape(f"{DOWN}.trellis", "I32", 16, 8, 64), "dtype", None),
    "length of suh": (set_shape(f"{DOWN}.suh", "F16", 128), "scales", "suh"),
    "length of svh": (set_shape(f"{DOWN}.svh", "F16", 256), "scales", "svh"),
    "rank of suh": (set_shape(f"{DOWN}.suh", "F16", 2, 128), "scales", "suh"),
    "dtype of suh": (set_shape(f"{DOWN}.suh", "F32", 256), "dtype", "suh"),
    "no suh": (drop(f"{DOWN}.suh"), "tensor-missing", "suh"),
    "no svh": (drop(f"{DOWN}.svh"), "tensor-missing", "svh"),
    "no trellis": (drop(f"{DOWN}.trellis"), "tensor-missing", "trellis"),
    "marker": (set_marker(f"{DOWN}.mcg", 0xCBAC1FEC), "marker", "mcg"),
    "marker of another kind": (set_shape(f"{DOWN}.mcg", "F32"), "marker", "mcg"),
    "marker with two values": (set_shape(f"{DOWN}.mcg", "I32", 2), "marker", "mcg"),
    "both markers": (set_marker(f"{DOWN}.mul1", MUL1_MARKER), "markers", "mcg"),
    "dense twin": (set_shape(f"{DOWN}.weight", "BF16", 128, 256), "packed-and-dense", "weight"),
    "length of the bias": (set_shape(f"{DOWN}.bias", "F16", 256), "bias", "bias"),
}


@pytest.mark.parametrize("case", DAMAGED_TENSORS)
def test_a_damaged_matrix_is_refused(checkpoint: Checkpoint, case: str) -> None:
    edit, code, leaf = DAMAGED_TENSORS[case]
    edit(checkpoint)
    checkpoint.write()
    error = refused(checkpoint)
    assert (error.code, error.tensor) == (code, f"{DOWN}.{leaf or 'trellis'}")
    assert error.file == str(checkpoint.folder / SHARDS[1])
    assert all(part in str(error) for part in (error.file, error.tensor, error.seen, error.fix))


def test_gate_and_up_must_agree_in_bits(checkpoint: Checkpoint) -> None:
    replace_up(48)(checkpoint)
    checkpoint.write()
    error = refused(checkpoint)
    assert (error.code, error.tensor) == ("gate-up", f"{UP}.trellis")


def test_a_missing_shard_is_named(checkpoint: Checkpoint) -> None:
    (checkpoint.write() / SHARDS[0]).unlink()
    error = refused(checkpoint)
    assert (error.code, error.file) == ("shard-missing", str(checkpoint.folder / SHARDS[0]))


@given(kept=st.floats(0, 1, exclude_max=True))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_shard_cut_anywhere_is_refused(checkpoint: Checkpoint, kept: float) -> None:
    path = checkpoint.write() / SHARDS[1]
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    error = refused(checkpoint)
    assert (error.code, error.file) == ("shard-truncated", str(path))


def test_bytes_behind_the_last_tensor_are_refused(checkpoint: Checkpoint) -> None:
    path = checkpoint.write() / SHARDS[1]
    path.write_bytes(path.read_bytes() + b"\0")
    assert refused(checkpoint).code == "shard-size"


def test_the_index_must_agree_with_the_shards(checkpoint: Checkpoint) -> None:
    folder = checkpoint.write()
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    checkpoint.write_json(INDEX, {"weight_map": weight_map | {"model.norm.weight": SHARDS[0]}})
    error = refused(checkpoint)
    assert (error.code, error.tensor) == ("tensor-missing", "model.norm.weight")
    assert error.file == str(folder / SHARDS[0])
    del weight_map[f"{UP}.trellis"]
    checkpoint.write_json(INDEX, {"weight_map": weight_map})
    error = refused(checkpoint)
    assert (error.code, error.tensor) == ("tensor-unindexed", f"{UP}.trellis")


@pytest.mark.parametrize(
    "content", [[], {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": "../b"}}]
)
def test_an_index_of_another_shape_is_refused(checkpoint: Checkpoint, content: object) -> None:
    checkpoint.write()
    checkpoint.write_json(INDEX, content)
    error = refused(checkpoint)
    assert error.code in {"json", "index"}
    assert error.file == str(checkpoint.folder / INDEX)


@pytest.mark.parametrize("name", [INDEX, "config.json", "quantization_config.json"])
@pytest.mark.parametrize("text", ['{"weight_map": {"a', "", "\xff", "[]"])
def test_cut_json_is_refused(checkpoint: Checkpoint, name: str, text: str) -> None:
    (checkpoint.write() / name).write_bytes(text.encode("latin-1"))
    error = refused(checkpoint)
    assert (error.code, error.file) == ("json", str(checkpoint.folder / name))


@pytest.mark.parametrize("key", REQUIRED_TEXT_KEYS)
def test_every_required_key_is_required(checkpoint: Checkpoint, key: str) -> None:
    del checkpoint.config["text_config"][key]
    checkpoint.write()
    error = refused(checkpoint)
    assert error.code == "config-key"
    assert repr(key) in str(error)
    assert error.file == str(checkpoint.folder / "config.json")


@pytest.mark.parametrize(
    ("key", "value"), [("architectures", []), ("architectures", "x"), ("text_config", None)]
)
def test_a_configuration_of_another_shape_is_refused(
    checkpoint: Checkpoint, key: str, value: object
) -> None:
    checkpoint.config[key] = value
    checkpoint.write()
    assert key in refused(checkpoint).seen


def storage(shape: object) -> dict[str, object]:
    return {"tensor_storage": {DOWN: {"stored_tensors": {f"{DOWN}.suh": {"shape": shape}}}}}


def test_stored_tensors_are_compared_with_the_weights(checkpoint: Checkpoint) -> None:
    checkpoint.write()
    checkpoint.write_json("quantization_config.json", storage([256]))
    check_checkpoint(checkpoint.folder)
    checkpoint.write_json("quantization_config.json", storage([128]))
    error = refused(checkpoint)
    assert (error.code, error.tensor) == ("storage", f"{DOWN}.suh")


@pytest.mark.parametrize("content", [storage(None), {"tensor_storage": []}, storage(["a"])])
def test_malformed_storage_is_refused(checkpoint: Checkpoint, content: dict[str, object]) -> None:
    checkpoint.write()
    content = content if content["tensor_storage"] else {"tensor_storage": [1]}
    checkpoint.write_json("quantization_config.json", content)
    assert refused(checkpoint).code == "json"


def entry(start: int, stop: int) -> dict[str, object]:
    return {"dtype": "F16", "shape": [(stop - start) // 2], "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F16", "shape": [3], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F17", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F16", "shape": [-2], "data_offsets": [0, -4]}},
        {"a": {"shape": [2], "data_offsets": [0, 4]}},
        {"a": entry(-4, 0), "b": entry(0, 4)},
        {"a": None},
        [],
    ],
)
def test_inconsistent_headers_are_refused(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(FormatError) as caught:
        read_header(path)
    assert (caught.value.code, caught.value.file) == ("shard-header", str(path))


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    text = json.dumps({"a": entry(0, 4), "b": entry(2, 6)}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(6))
    with pytest.raises(FormatError, match="overlap") as caught:
        CheckpointIndex.read(tmp_path)
    assert caught.value.tensor == "b"
