"""Matrices of a checkpoint, dense or packed, without an encoder.

What: `MatrixMaker` adds the tensors of one linear map to a state dict, in the form its role has in
the family. Why no encoder: every bit pattern is a legal trellis, so a random one with scales of
unit gain is a random matrix (the rotations keep the variance), and it is its own exact value.

What must stay true: `gain` is the ratio of output to input RMS for inputs without structure, in
the dense and the packed form alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm_exl3.format.layout import MCG_MARKER, MUL1_MARKER, TILE, Codebook
from glm_exl3.ref.tiny.recipe import RandomStreams, Recipe, Role

# Standard deviation of a decoded random state, per codebook.
CODEBOOK_STD = {Codebook.INST3: 1.24371, Codebook.MCG: 1.24411, Codebook.MUL1: 1.00031}
_MARKERS = {Codebook.MCG: ("mcg", MCG_MARKER), Codebook.MUL1: ("mul1", MUL1_MARKER)}


def marker(codebook: Codebook) -> dict[str, Tensor]:
    """The marker tensor of a codebook by its suffix; `3inst` has none."""
    if codebook not in _MARKERS:
        return {}
    suffix, value = _MARKERS[codebook]
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return {suffix: torch.tensor(signed, dtype=torch.int32, device="cpu")}


@dataclass(frozen=True)
class Packed:
    """A packed W[k, n]: int16 trellis `[k/16, n/16, 16K]`, fp16 `suh` `[k]` and `svh` `[n]`."""

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: Codebook

    def state_dict(self, module: str) -> dict[str, Tensor]:
        """The tensors of this matrix under the names of a checkpoint."""
        named = {"trellis": self.trellis, "suh": self.suh, "svh": self.svh}
        return {f"{module}.{suffix}": t for suffix, t in (named | marker(self.codebook)).items()}


@dataclass
class MatrixMaker:
    """Adds linear maps to `tensors`, stored as `recipe` says."""

    streams: RandomStreams
    recipe: Recipe
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def input_signs(self, module: str, size: int) -> Tensor:
        """fp32 `[size]` random input scales of unit RMS: a sign and a moderate magnitude."""
        magnitudes = 0.8 + 0.4 * self.streams.uniform(f"{module}.suh", size)
        return magnitudes * self.streams.signs(f"{module}.su", size)

    def packed(
        self,
        module: str,
        size: tuple[int, int],
        bits: int,
        gain: float | Tensor,
        suh: Tensor | None = None,
    ) -> Packed:
        """A random packed matrix of `size` (in, out); `gain` may be one per output channel."""
        rows, columns = size
        codebook = self.recipe.codebook
        trellis = self.streams.trellis(module, rows // TILE, columns // TILE, TILE * bits)
        left = self.input_signs(module, rows) if suh is None else suh
        unit = 1.0 / (CODEBOOK_STD[codebook] * rows**0.5)
        right = self.streams.signs(f"{module}.sv", columns) * unit * gain
        return Packed(trellis, left.to(torch.float16), right.to(torch.float16), codebook)

    def linear(
        self,
        module: str,
        role: Role,
        size: tuple[int, int],
        gain: float = 1.0,
        suh: Tensor | None = None,
    ) -> None:
        """Add a random linear map of `size` (in, out)."""
        bits = self.recipe.packed_bits(role)
        if bits is not None:
            self.tensors |= self.packed(module, size, bits, gain, suh).state_dict(module)
            return
        rows, columns = size
        weight = self.streams.normal(module, columns, rows) * (gain / rows**0.5)
        self.plain(f"{module}.weight", weight)

    def structured(self, module: str, role: Role, weight: Tensor) -> None:
        """Add a linear map with given values, fp32 `[out, in]`; packing it adds some noise."""
        from glm_exl3.ref.tiny.approximate import approximate

        bits = self.recipe.packed_bits(role)
        if bits is None:
            self.plain(f"{module}.weight", weight)
            return
        packed = approximate(weight.T, bits, self.recipe.codebook, self.streams, module)
        self.tensors |= packed.state_dict(module)

    def plain(self, name: str, values: Tensor) -> None:
        """Add a dense tensor in the family's dtype."""
        self.tensors[name] = values.to(torch.bfloat16).to(self.recipe.dtype).contiguous()

    def norm(self, name: str, size: int, spread: float = 0.1) -> None:
        """Add an RMSNorm weight around 1."""
        self.plain(f"{name}.weight", 1 + spread * self.streams.normal(name, size))

    def wide(self, name: str, values: Tensor) -> None:
        """Add a tensor that stays fp32, with values that bf16 holds exactly."""
        self.tensors[name] = values.to(torch.bfloat16).to(torch.float32).contiguous()
