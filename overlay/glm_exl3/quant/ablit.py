"""The edit `ablit`: output projections replaced by a donor's, or with a direction taken out.

What: a `WeightEdit` on `self_attn.o_proj` of some layers. `transplant` puts the donor's bytes in
place of the matrix, `proj` applies `ref.projection.weight`. Why no collective: an output projection
is cut along its input, so every rank holds whole columns and its own columns of the donor.

What must stay true: nothing is edited with data other than what was pinned; a donor of another
model, another shape or another dtype is an error, and so is a missing one; neither method stands in
for the other. A packed matrix is encoded again by the caller, which the log says.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from glm_exl3 import envs
from glm_exl3.format.donor import (
    FETCH,
    GEOMETRY,
    Donor,
    DonorTensor,
    EditError,
    geometry_difference,
    parse_layers,
    read_tensor,
    show_layers,
)
from glm_exl3.format.headers import read_object
from glm_exl3.log import logger
from glm_exl3.quant import edits
from glm_exl3.quant.edits import Placement
from glm_exl3.ref import projection

NAME = "ablit"
MAX_CHANGE = 0.5
TOLERANCE = 0.02
PART_TOLERANCE = 0.25
_MODULE = re.compile(r"^model\.layers\.(\d+)\.(?:mtp_block\.)?self_attn\.o_proj$")
_log = logger(__name__)


class Method(Protocol):
    """What a layer's matrix becomes."""

    @property
    def content(self) -> str:
        """Hash of the data."""
        ...

    def result(self, layer: int, shape: tuple[int, int], shard: torch.Tensor,
               placement: Placement) -> torch.Tensor: ...  # fmt: skip


@dataclass(frozen=True)
class Transplant:
    """The donor's matrices; `folder` was filled by `start.sh ablit fetch`."""

    folder: Path
    donor: Donor

    @classmethod
    def open(cls, folder: Path) -> Transplant:
        """Raises EditError when the donor is missing or incomplete."""
        return cls(folder, Donor.require(folder))

    @property
    def content(self) -> str:
        return self.donor.digest

    def tensor(self, layer: int) -> DonorTensor:
        for tensor in self.donor.tensors:
            if tensor.layer == layer:
                return tensor
        raise EditError(
            code="donor-layer",
            seen=f"the donor in {self.folder} has layers {show_layers(self.donor.layers)}",
            why=f"layer {layer} was asked for and would stay as it is",
            fix=f"run {FETCH}, or correct ABLIT_LAYERS",
        )

    def result(
        self, layer: int, shape: tuple[int, int], shard: torch.Tensor, placement: Placement
    ) -> torch.Tensor:
        """The donor's bytes of this rank's part. Raises EditError for another shape or dtype."""
        tensor = self.tensor(layer)
        fits = tensor.dtype == "BF16" and (placement.packing or shard.dtype == torch.bfloat16)
        if tensor.shape != shape or not fits:
            raise EditError(
                code="donor-unfit",
                seen=f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, the matrix "
                f"{str(shard.dtype).removeprefix('torch.')} {list(shape)}",
                why="only bytes of the same kind can take its place",
                fix="use a donor of this model in BF16",
            )
        data = bytearray(read_tensor(self.folder, tensor))
        whole = torch.frombuffer(data, dtype=torch.bfloat16).view(shape)
        out, inputs = placement.out, placement.inputs
        part = whole[out.start : out.stop, inputs.start : inputs.stop]
        return part.to(shard.device, shard.dtype)


@dataclass(frozen=True)
class Projection:
    """`directions` by layer, under -1 for all layers; unit vectors of the hidden size, fp32."""

    directions: dict[int, torch.Tensor]
    alpha: float
    content: str

    @classmethod
    def open(cls, path: Path, alpha: float) -> Projection:
        """Tensors `direction` or `direction.N` of a safetensors file. Raises EditError."""
        if not path.is_file():
            raise EditError(
                code="direction-missing",
                seen=f"{path} does not exist",
                why="the projection has no direction to take out, and no other edit stands in",
                fix="./start.sh ablit direction FILE, or set ABLIT_DIRECTION to a file",
            )
        from safetensors.torch import load

        try:
            data = path.read_bytes()
            found = {
                -1 if name == "direction" else int(name.removeprefix("direction.")): tensor
                for name, tensor in load(data).items()
            }
            units = {layer: projection.unit(tensor) for layer, tensor in found.items()}
            if not units or any(tensor.dim() != 1 for tensor in found.values()):
                raise ValueError("it holds no vectors")
        except Exception as error:
            raise EditError(
                code="direction",
                seen=f"{path} is no file of directions ({error})",
                why="one tensor `direction`, or `direction.N` for every layer N, is expected",
                fix="set ABLIT_DIRECTION to a safetensors file of that kind",
            ) from error
        return cls(units, alpha, f"{hashlib.sha256(data).hexdigest()[:16]}*{alpha:g}")

    def result(
        self, layer: int, shape: tuple[int, int], shard: torch.Tensor, placement: Placement
    ) -> torch.Tensor:
        """(I - alpha r r^T) times this rank's columns. Raises EditError for another size."""
        direction = self.directions.get(layer, self.directions.get(-1))
        size = "absent" if direction is None else f"of size {direction.numel()}"
        if direction is None or direction.numel() != shape[0] or not placement.whole_columns(shape):
            raise EditError(
                code="direction-unfit",
                seen=f"the direction of layer {layer} is {size}; the matrix writes {shape[0]}, of "
                f"which this rank holds {placement.out.width}",
                why="the component along it could not be taken out",
                fix="use directions of this model's hidden size for every layer of ABLIT_LAYERS",
            )
        return projection.weight(shard, direction, self.alpha)


@dataclass(frozen=True)
class Fingerprint:
    """Published relative changes by layer; empty where none is known."""

    changes: dict[int, float]
    tolerance: float = TOLERANCE
    part_tolerance: float = PART_TOLERANCE

    @classmethod
    def open(cls, path: Path | None) -> Fingerprint:
        """`{"layers": {"15": 0.03}, "tolerance": 0.02}`. Raises EditError, FormatError."""
        if path is None:
            return cls({})
        value = read_object(path)
        try:
            changes = {int(layer): float(change) for layer, change in value["layers"].items()}
            return cls(
                changes,
                float(value.get("tolerance", TOLERANCE)),
                float(value.get("part_tolerance", PART_TOLERANCE)),
            )
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise EditError(
                code="fingerprint",
                seen=f"{path} is no fingerprint ({error!r})",
                why="the edit could not be compared with it",
                fix='write {"layers": {"15": 0.03}, "tolerance": 0.02}, or unset ABLIT_FINGERPRINT',
            ) from error

    def judge(self, layer: int, change: float, *, part: bool) -> str:
        """What to log about a layer. Raises EditError when it is not the published change.

        A rank that holds a part of the matrix compares with the wider tolerance.
        """
        if layer not in self.changes:
            return "no fingerprint known"
        known = self.changes[layer]
        allowed = self.part_tolerance if part else self.tolerance
        if not abs(change - known) <= allowed * known:
            raise EditError(
                code="fingerprint",
                seen=f"layer {layer} changes by {change:.4f}, its fingerprint says {known:.4f}",
                why="this is not the edit that was published, or not the model it is for",
                fix="check donor, direction and alpha; or unset ABLIT_FINGERPRINT",
            )
        return f"fingerprint {known:.4f}, within {allowed:.0%}"


@dataclass
class Ablit:
    """The edit; `changes` collects the relative change of every edited layer."""

    method: Method
    layers: tuple[int, ...]
    with_mtp: bool = True
    fingerprint: Fingerprint = field(default_factory=lambda: Fingerprint({}))
    changes: dict[int, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return NAME

    @property
    def digest(self) -> str:
        kind = type(self.method).__name__.lower()
        mtp = "" if self.with_mtp else "-mtp"
        return f"{kind}/{show_layers(self.layers)}{mtp}/{self.method.content}"

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"target", "mtp"} if self.with_mtp else {"target"})

    def wants(self, module: str) -> bool:
        match = _MODULE.match(module)
        return match is not None and int(match[1]) in self.layers

    def edit(
        self,
        module: str,
        full_shape: tuple[int, int],
        shard: torch.Tensor,
        placement: Placement,
    ) -> torch.Tensor | None:
        """See `WeightEdit`; a matrix that the donor has unchanged is left, with a warning."""
        match = _MODULE.match(module)
        assert match is not None
        layer = int(match[1])
        changed = self.method.result(layer, full_shape, shard, placement)
        change = projection.relative_change(shard, changed)
        self.changes[layer] = change
        if isinstance(self.method, Transplant) and not change <= MAX_CHANGE:
            raise EditError(
                code="donor-unfit",
                seen=f"layer {layer} of the donor differs by {change:.2f} of the matrix itself",
                why="it is not an edit of this model",
                fix="name a donor of this model in ABLIT_DONOR",
            )
        part = not (placement.whole_columns(full_shape) and placement.whole_rows(full_shape))
        said = self.fingerprint.judge(layer, change, part=part)
        packed = placement.packing
        again = f", encoded again at K={packed.bits:g}" if packed else ""
        where = " (this rank's part)" if part else ""
        if torch.equal(changed, shard):
            _log.warning("ablit: layer %d: the donor holds the same matrix", layer)
            return None
        _log.info(
            "ablit: layer %d: relative change %.4f%s, %s%s", layer, change, where, said, again
        )
        return changed


def check_model(edit: Ablit, text_config: Any) -> None:
    """Raise EditError when a layer does not exist or the donor is of another model."""
    count, mtp = int(text_config.num_hidden_layers), int(text_config.num_nextn_predict_layers or 0)
    beyond = [layer for layer in edit.layers if layer >= count + mtp]
    if beyond:
        raise EditError(
            code="ablit-layers",
            seen=f"layer(s) {show_layers(beyond)} of ABLIT_LAYERS do not exist: the model has "
            f"{count} and {mtp} for MTP",
            why="fewer layers than asked for would be edited",
            fix="correct ABLIT_LAYERS",
        )
    if not isinstance(edit.method, Transplant):
        return
    here = {key: getattr(text_config, key) for key in GEOMETRY}
    key = geometry_difference(edit.method.donor.geometry, here)
    if key:
        raise EditError(
            code="donor-unfit",
            seen=f"{key} of the donor {edit.method.donor.repo} differs from this model's",
            why="its output projections are of another model",
            fix="name a donor of this model in ABLIT_DONOR",
        )


def from_environment() -> Ablit | None:
    """The edit that `GLM_EXL3_ABLIT` asks for, or None. Raises EditError, FormatError."""
    kind = envs.ABLIT.read()
    if kind == "off":
        return None
    source = Path(envs.ABLIT_SOURCE.read())
    method: Method = (
        Transplant.open(source)
        if kind == "transplant"
        else Projection.open(source, envs.ABLIT_ALPHA.read())
    )
    pin = envs.ABLIT_PIN.read()
    if pin and not method.content.startswith(pin):
        raise EditError(
            code="ablit-pin",
            seen=f"{source} has the hash {method.content}, pinned is {pin}",
            why="these are not the data that were checked at the launch",
            fix="start again; ./start.sh ablit verify reads every byte",
        )
    path = envs.ABLIT_FINGERPRINT.read()
    fingerprint = Fingerprint.open(Path(path) if path else None)
    layers = parse_layers(envs.ABLIT_LAYERS.read())
    return Ablit(method, layers, envs.ABLIT_MTP.read(), fingerprint)


def register() -> None:
    """Register the edit if one is asked for."""
    edit = from_environment()
    if edit is not None:
        edits.register(edit)


def check_registered(text_config: Any) -> None:
    """`check_model` of the registered edit; called before a model is built."""
    for edit in edits.registered():
        if isinstance(edit, Ablit):
            check_model(edit, text_config)
