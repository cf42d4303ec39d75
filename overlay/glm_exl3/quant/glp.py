"""Projections of the residual streams, read from a GGUF file and judged before use.

The file is a GLP (GGUF Layer Projection): tensors `direction.N`, fp32 and one-dimensional, to be
taken out of what layer N leaves, and keys that say how. A file of the same tensors without those
keys is a llama.cpp control vector, which is added; both load as the other without an error, so what
does not say `project` is refused, as is another place in the network, another width, rank or
revision of the format, and a strength at which the model is known to break.

Format: github.com/msuiche/weightless, spec/GLP.md, whose keys begin with `glp.` or, in older files,
`dspark.`. The directions of GLM-5.3-Flash span all streams of a token, width 4 * 4096; its author
measured 2.0 as the right strength and garbled text from 2.5 on.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glm_exl3 import envs
from glm_exl3.format.donor import EditError, parse_layers, show_layers

BREAKS_AT = 2.5
HOOK = "residual_stream_post_layer"
MODEL = "glm-5.3-flash"
PREFIXES = ("glp.", "dspark.")
VERSIONS = (1, 2)
UNKNOWN_SCALES = ("dir_scales", "layer_scales")
NORM_TOLERANCE = 1e-3
_TENSOR = re.compile(r"^direction\.(\d+)$")


@dataclass(frozen=True)
class Steering:
    """What to take out: unit directions fp32 [N * H] by layer, the strength, the file's hash."""

    directions: dict[int, np.ndarray]
    alpha: float
    sha256: str
    base: str

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(self.directions))


@dataclass(frozen=True)
class Request:
    """What the settings ask for; `alpha` 0 means that of the file."""

    path: Path
    layers: tuple[int, ...]
    alpha: float = 0.0
    pin: str = ""
    force: bool = False

    @property
    def digest(self) -> str:
        """What ranks compare: the file's hash and the settings."""
        forced = "!" if self.force else ""
        layers = show_layers(self.layers)
        return f"{_hash(self.path)[:16]}*{self.alpha:g}{forced}/{layers}"


def requested() -> Request | None:
    """What `GLM_EXL3_STEER_*` asks for, or None when steering is off."""
    path = envs.STEER_VECTOR.read()
    if not path:
        return None
    return Request(
        Path(path),
        parse_layers(envs.STEER_LAYERS.read()),
        envs.STEER_ALPHA.read(),
        envs.STEER_PIN.read(),
        envs.STEER_FORCE.read(),
    )


def load(request: Request, *, streams: int, hidden: int, layers: int) -> Steering:
    """The steering of a model with `layers` layers of `streams` streams of width `hidden`.

    Raises EditError for a file or a strength that does not belong to it.
    """
    path = request.path
    sha256 = _hash(path)
    if request.pin and sha256 != request.pin.lower():
        raise _unfit(path, f"has SHA-256 {sha256}, pinned is {request.pin}", "STEER_SHA256")
    keys, tensors = _read(path)
    alpha = request.alpha or _default_alpha(path, keys)
    _check_keys(path, keys)
    if abs(alpha) >= BREAKS_AT and not request.force:
        raise EditError(
            code="steer-alpha",
            seen=f"the strength is {alpha:g}",
            why=f"from {BREAKS_AT:g} on this model is known to answer with garbled text",
            fix="set STEER_ALPHA below it (2.0 was measured), or STEER_FORCE=1",
        )
    found = {_layer(path, name): value for name, value in tensors.items()}
    declared = str(keys.get("layer_ids_zero_based") or "")
    if declared and sorted(parse_layers(declared)) != sorted(found):
        raise _unfit(path, f"declares layers {declared}, holds {sorted(found)}", "the file")
    missing = sorted(set(request.layers) - set(found))
    if missing:
        seen = f"has no direction for layer(s) {show_layers(missing)}, only {show_layers([*found])}"
        raise _unfit(path, seen, "STEER_LAYERS")
    chosen = {layer: found[layer] for layer in request.layers}
    for layer, direction in chosen.items():
        _check_direction(path, layer, direction, layers, streams * hidden)
    base = str(keys.get("base") or "unknown")
    return Steering(chosen, alpha, sha256, base)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Keys without their prefix, and the direction tensors."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {}
        for tensor in reader.tensors:
            if tensor.name.startswith("direction."):
                if tensor.tensor_type != gguf.GGMLQuantizationType.F32 or len(tensor.shape) != 1:
                    raise ValueError(f"{tensor.name} is not a vector of fp32")
                tensors[tensor.name] = np.array(tensor.data, dtype=np.float32)
    except Exception as error:
        raise _unfit(path, f"cannot be read as GGUF ({error})", "the file") from error
    keys: dict[str, Any] = {"base": fields.get("general.base_model.0.name")}
    for prefix in reversed(PREFIXES):
        keys |= {n.removeprefix(prefix): v for n, v in fields.items() if n.startswith(prefix)}
    return keys, tensors


def _check_keys(path: Path, keys: dict[str, Any]) -> None:
    """Raise EditError for everything in the keys that would be applied wrongly."""
    if keys.get("mode") != "project":
        raise _unfit(
            path, f"has mode {keys.get('mode')!r}; only 'project' is applied here", "the file"
        )
    if keys.get("hook_point") != HOOK:
        raise _unfit(path, f"is for {keys.get('hook_point')!r}, not for {HOOK!r}", "the file")
    if keys.get("spec_version", 1) not in VERSIONS or keys.get("rank", 1) != 1:
        seen = f"has version {keys.get('spec_version')} and rank {keys.get('rank', 1)}"
        raise _unfit(path, f"{seen}; known are 1 and 2, with one direction a layer", "the file")
    scales = sorted(set(keys) & set(UNKNOWN_SCALES))
    if scales:
        raise _unfit(path, f"has {', '.join(scales)}, which would be ignored", "the file")
    base = str(keys.get("base") or "")
    if base and MODEL not in base.lower().replace("_", "-").replace(" ", "-"):
        raise _unfit(path, f"was made for {base}", "the file")


def _default_alpha(path: Path, keys: dict[str, Any]) -> float:
    value = keys.get("alpha_default")
    if not isinstance(value, float) or not np.isfinite(value) or value == 0:
        raise _unfit(path, f"names no strength (alpha_default {value!r})", "STEER_ALPHA")
    return value


def _layer(path: Path, name: str) -> int:
    match = _TENSOR.match(name)
    if match is None or int(match[1]) == 0:
        raise _unfit(path, f"holds {name}; layers are counted from 1 and have one each", "the file")
    return int(match[1])


def _check_direction(
    path: Path, layer: int, direction: np.ndarray, layers: int, width: int
) -> None:
    if layer >= layers:
        raise _unfit(path, f"names layer {layer}, the model has {layers}", "STEER_LAYERS")
    if direction.size != width:
        seen = f"has {direction.size} values for layer {layer}, the streams have {width}"
        raise _unfit(path, seen, "the file")
    norm = float(np.linalg.norm(direction.astype(np.float64)))
    if not abs(norm - 1) <= NORM_TOLERANCE:
        raise _unfit(path, f"has length {norm:g} in layer {layer}, not 1", "the file")


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise _unfit(path, f"cannot be read ({error.strerror})", "STEER_VECTOR") from error


def _unfit(path: Path, seen: str, what: str) -> EditError:
    return EditError(
        code="steer-file",
        seen=f"{path} {seen}",
        why="taking the wrong thing out of the residual streams does not fail, it spoils answers",
        fix=f"correct {what}, or leave STEER_VECTOR empty",
    )
