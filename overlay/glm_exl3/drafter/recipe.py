"""Which matrices of a drafter are packed, together with which others.

Packed: `fc`, query and output projections, the MLP, and the projections that make the kernels of
the dynamic convolutions. Not packed: key and value projections (vLLM multiplies those of all layers
at once with every token of the context), the convolutions' base kernels, norms and the selector.
Gate and up read the same input and share their input scales, so they load as one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from glm_exl3.format.errors import FormatError, GlmExl3Error
from glm_exl3.format.headers import TensorEntry
from glm_exl3.format.layout import HADAMARD
from glm_exl3.format.metadata import PACKED_LEAVES

FLOATS = ("BF16", "F16", "F32")
_PACKED = re.compile(
    r"^(fc|layers\.\d+\.(self_attn\.[qo]_proj|mlp\.(gate|up|down)_proj"
    r"|(attention|mlp)_conv\.kernel_projection))$"
)
_PADDED = re.compile(r"\.kernel_projection$")


@dataclass(frozen=True)
class Job:
    """Modules packed with one set of input scales; `rows` are the out features of each."""

    modules: tuple[str, ...]
    in_features: int
    rows: tuple[int, ...]

    @property
    def weights(self) -> int:
        return self.in_features * sum(self.rows)

    @property
    def layer(self) -> int | None:
        """The layer the modules belong to; None for `fc`."""
        parts = self.modules[0].split(".")
        return int(parts[1]) if parts[0] == "layers" else None


def jobs(tensors: Mapping[str, TensorEntry]) -> list[Job]:
    """What to pack, in name order. Raises GlmExl3Error for a drafter that cannot be packed."""
    packed = [name for name in tensors if name.rpartition(".")[2] in PACKED_LEAVES]
    if packed:
        raise GlmExl3Error(
            code="packed-already",
            seen=f"the drafter holds packed matrices, {packed[0]} among them",
            why="packing what was packed would add one error to another",
            fix="start from the BF16 drafter",
        )
    modules = sorted(
        name.removesuffix(".weight")
        for name in tensors
        if name.endswith(".weight") and _PACKED.match(name.removesuffix(".weight"))
    )
    if "fc" not in modules or len(modules) == 1:
        raise GlmExl3Error(
            code="no-drafter",
            seen=f"{len(modules)} of {len(tensors)} tensors are matrices of a DFlash2 drafter",
            why="there is nothing to pack",
            fix="give the folder of a DFlash2 drafter with config.json and safetensors files",
        )
    sizes = {module: _size(module, tensors[f"{module}.weight"]) for module in modules}
    made = []
    for module in modules:
        if module.endswith(".mlp.up_proj"):
            continue
        group = [module]
        if module.endswith(".mlp.gate_proj"):
            group.append(module.replace("gate_proj", "up_proj"))
        if any(other not in sizes for other in group):
            raise _refused(module, tensors, "it has no up_proj beside it", "a gate needs both")
        made.append(Job(tuple(group), sizes[module][1], tuple(sizes[one][0] for one in group)))
    return made


def _size(module: str, entry: TensorEntry) -> tuple[int, int]:
    """Out and in features of a matrix that can be packed."""
    where = {module + ".weight": entry}
    if entry.dtype not in FLOATS or len(entry.shape) != 2:
        seen = f"it is {entry.dtype} {list(entry.shape)}"
        raise _refused(module, where, seen, "only matrices of plain floating point can be packed")
    rows, columns = entry.shape
    if columns % HADAMARD or (rows % HADAMARD and not _PADDED.search(module)):
        seen = f"it has {rows} x {columns} features"
        raise _refused(module, where, seen, f"EXL3 rotates whole blocks of {HADAMARD}")
    return rows, columns


def _refused(module: str, tensors: Mapping[str, TensorEntry], seen: str, why: str) -> FormatError:
    name = f"{module}.weight"
    return FormatError(
        code="unpackable",
        seen=seen,
        why=why,
        fix="pack another drafter, or serve this one as it is",
        file=str(tensors[name].file),
        tensor=name,
    )
