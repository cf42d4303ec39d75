"""Packed matrices as the operations see them.

Checkpoints may store channel scales as fp16 `suh`/`svh` or as legacy sign words `su`/`sv`; here
only fp16 scales exist, so kernels have one form to read. Shapes are those of one rank: a cut matrix
is a smaller matrix, nothing here knows about ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm_exl3.format.layout import TILE, Codebook
from glm_exl3.ref.moe import Exl3Stack

__all__ = ["Exl3Stack", "PackedMatrix"]


@dataclass(frozen=True)
class PackedMatrix:
    """One matrix of y = x @ W.

    `trellis` int16 [k/16, n/16, 16*K]; `suh` fp16 [k]; `svh` fp16 [n]. K is the last dimension of
    `trellis` divided by 16 and is never stored apart from it.
    """

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: Codebook

    @property
    def in_features(self) -> int:
        return int(self.trellis.shape[0]) * TILE

    @property
    def out_features(self) -> int:
        return int(self.trellis.shape[1]) * TILE

    def joins(self, other: PackedMatrix) -> bool:
        """Whether both read the same rotated input with the same code, so that they can be one."""
        return (
            self.codebook is other.codebook
            and self.trellis.shape[0] == other.trellis.shape[0]
            and self.trellis.shape[2] == other.trellis.shape[2]
            and torch.equal(self.suh, other.suh)
        )

    def join(self, other: PackedMatrix) -> PackedMatrix:
        """Both side by side along n; legal only where `joins` holds."""
        return PackedMatrix(
            torch.cat([self.trellis, other.trellis], dim=1),
            self.suh,
            torch.cat([self.svh, other.svh]),
            self.codebook,
        )
