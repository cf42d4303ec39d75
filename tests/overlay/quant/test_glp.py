"""Vectors in GGUF files: what says exactly what to do is read, everything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from glm_exl3.format.donor import EditError
from glm_exl3.quant import glp
from glm_exl3.quant.glp import Request

STREAMS, HIDDEN, LAYERS = 4, 32, 6
WIDTH = STREAMS * HIDDEN
GOOD = {
    "mode": "project",
    "hook_point": "residual_stream_post_layer",
    "spec_version": 1,
    "rank": 1,
    "alpha_default": 2.0,
}
Write = Callable[..., Request]


def direction(layer: int, width: int = WIDTH, length: float = 1.0) -> np.ndarray:
    vector = np.random.default_rng(layer).normal(size=width)
    return (length * vector / np.linalg.norm(vector)).astype(np.float32)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A file of the layers 1 to 5, with changed keys (None: absent) or tensors, as a request."""

    def file(
        tensors: dict[str, np.ndarray] | None = None,
        *,
        prefix: str = "glp.",
        base: str = "",
        **changed: object,
    ) -> Request:
        path = tmp_path / "vector.gguf"
        writer = gguf.GGUFWriter(path, "controlvector")
        if base:
            writer.add_string("general.base_model.0.name", base)
        for key, value in {**GOOD, **changed}.items():
            if isinstance(value, str):
                writer.add_string(prefix + key, value)
            elif isinstance(value, float):
                writer.add_float32(prefix + key, value)
            elif value is not None:
                writer.add_uint32(prefix + key, int(value))
        named = tensors or {f"direction.{n}": direction(n) for n in range(1, LAYERS)}
        for name, value in named.items():
            writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Request(path, (1, 2, 5))

    return file


def load(request: Request) -> glp.Steering:
    return glp.load(request, streams=STREAMS, hidden=HIDDEN, layers=LAYERS)


@pytest.mark.parametrize("prefix", ["glp.", "dspark."])
def test_the_layers_asked_for_are_read(write: Write, prefix: str) -> None:
    found = load(write(prefix=prefix, base="GLM-5.3-Flash"))
    assert (found.layers, found.alpha, found.base) == ((1, 2, 5), 2.0, "GLM-5.3-Flash")
    for layer, values in found.directions.items():
        np.testing.assert_array_equal(values, direction(layer))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mode": None}, "mode None; only 'project'"),
        ({"mode": "add"}, "mode 'add'"),
        ({"hook_point": "ffn_out_pre_residual"}, "is for 'ffn_out_pre_residual'"),
        ({"hook_point": None}, "is for None"),
        ({"spec_version": 3}, "version 3"),
        ({"rank": 2}, "rank 2"),
        ({"dir_scales": "1"}, "dir_scales, which would be ignored"),
        ({"layer_scales": "1"}, "layer_scales, which would be ignored"),
        ({"base": "Qwen3.8-27B"}, "was made for Qwen3.8-27B"),
        ({"alpha_default": None}, "names no strength"),
        ({"layer_ids_zero_based": "0,1,2,3,4"}, "declares layers 0,1,2,3,4"),
    ],
    ids=str,
)
def test_keys_that_say_otherwise_are_refused(write: Write, changed: dict, said: str) -> None:
    with pytest.raises(EditError) as caught:
        load(write(**changed))
    assert said in caught.value.seen


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"direction.0": direction(1)}, "direction.0"),
        ({"direction.1.1": direction(1)}, "direction.1.1"),
        ({"direction.x": direction(1)}, "direction.x"),
        ({"direction.1": direction(1, HIDDEN)}, "32 values for layer 1, the streams have 128"),
        ({"direction.1": direction(1, length=0.5)}, "length 0.5"),
        ({"direction.1": np.full(WIDTH, np.nan, np.float32)}, "length nan"),
        ({"direction.1": direction(1).astype(np.float16)}, "not a vector of fp32"),
        ({"direction.2": direction(2)}, "no direction for layer(s) 1"),
        ({"other": direction(1)}, "no direction for layer(s) 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_tensors_are_refused(write: Write, tensors: dict, said: str) -> None:
    request = replace(write(tensors), layers=(1,))
    with pytest.raises(EditError) as caught:
        load(request)
    assert said in caught.value.seen


def test_layers_beyond_the_model_are_refused(write: Write) -> None:
    with pytest.raises(EditError, match="names layer 6, the model has 6"):
        load(replace(write({"direction.6": direction(6)}), layers=(6,)))


@pytest.mark.parametrize("alpha", [2.5, 3.0, -2.5])
def test_a_strength_that_breaks_the_model_needs_force(write: Write, alpha: float) -> None:
    request = replace(write(), alpha=alpha)
    with pytest.raises(EditError, match="garbled") as caught:
        load(request)
    assert "STEER_FORCE=1" in caught.value.fix
    assert load(replace(request, force=True)).alpha == alpha
    assert load(replace(request, alpha=2.49)).alpha == 2.49
    with pytest.raises(EditError, match="the strength is 3"):
        load(replace(write(alpha_default=3.0), alpha=0.0))


def test_another_file_than_the_pinned_one_is_refused(write: Write) -> None:
    request = write()
    found = load(request)
    assert load(replace(request, pin=found.sha256.upper())) is not None
    with pytest.raises(EditError, match="pinned is 000"):
        load(replace(request, pin="0" * 64))


def test_what_is_no_gguf_is_told(tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(b"GGUF" + b"\xff" * 60)
    for name, said in (("v", "cannot be read as GGUF"), ("none", "cannot be read (No such file")):
        with pytest.raises(EditError) as caught:
            load(Request(tmp_path / name, (1,)))
        assert said in caught.value.seen


def test_the_environment_asks_for_it(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    assert glp.requested() is None
    request = replace(write(), alpha=1.5)
    for name, value in (("VECTOR", str(request.path)), ("ALPHA", "1.5"), ("LAYERS", "1-2,5")):
        monkeypatch.setenv(f"GLM_EXL3_STEER_{name}", value)
    assert glp.requested() == request
    assert request.digest.endswith("*1.5/1-2,5")
    assert replace(request, force=True).digest != request.digest
