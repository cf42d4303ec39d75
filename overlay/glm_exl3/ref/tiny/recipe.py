"""How each checkpoint family stores each kind of matrix, and named random streams.

What: `Family` and its `Recipe` (codebook and bits per role), and `RandomStreams`, which draws the
values of one tensor from its own seed. Why by name: a tensor keeps its bytes when another one is
added, and the two families of one seed agree wherever they store the same thing.

What must stay true: NumPy's PCG64 streams and IEEE arithmetic are the only sources of values, and
everything that sums is computed in fp64 before it is rounded to a stored dtype, so the bytes of a
seed depend neither on threads nor on the CPU's vector width. `tr3` packs the routed experts only;
`full` packs what ExLlamaV3 1.6.5 packs, with another K for nearly every role so that a loader
that takes K from the config instead of the tensor cannot work.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glm_exl3.format.layout import Codebook


class Family(enum.Enum):
    """A layout of the checkpoint on disk."""

    TR3 = "tr3"
    FULL = "full"
    BF16 = "bf16"


class Role(enum.Enum):
    """What a matrix is for; a recipe stores all matrices of one role alike."""

    EXPERT = "routed expert"
    SHARED = "shared expert"
    DENSE = "dense MLP"
    KDA_IN = "KDA q, k, v"
    KDA_OUT = "KDA output"
    MLA_Q_A = "MLA query, first half"
    MLA_Q_B = "MLA query, second half"
    MLA_KV_A = "MLA latent"
    MLA_OUT = "MLA output"
    INDEX_Q = "indexer query"
    HEAD = "lm_head"
    MTP_IN = "MTP input"
    DRAFT = "drafter linear"
    PLAIN = "never packed"


@dataclass(frozen=True)
class Recipe:
    """Storage of one family: bits per packed role, the codebook, the dtype of everything else.

    `pull` is the RMS of the visible part of the embeddings, which decides how often greedy decoding
    follows a cycle of `vocabulary`; it is measured per family, since the layers' values differ.
    """

    codebook: Codebook
    bits: Mapping[Role, int]
    dtype: torch.dtype
    fused_kda: bool
    shared_gate_scales: bool
    pull: float = 0.0

    def packed_bits(self, role: Role) -> int | None:
        """K of a role, or None where it is stored densely."""
        return self.bits.get(role)


RECIPES: Mapping[Family, Recipe] = {
    Family.TR3: Recipe(
        codebook=Codebook.MCG,
        bits={Role.EXPERT: 4},
        dtype=torch.bfloat16,
        fused_kda=False,
        shared_gate_scales=True,
        pull=0.64,
    ),
    Family.FULL: Recipe(
        codebook=Codebook.MUL1,
        bits={
            Role.EXPERT: 3,
            Role.SHARED: 5,
            Role.DENSE: 4,
            Role.KDA_IN: 4,
            Role.KDA_OUT: 5,
            Role.MLA_Q_A: 5,
            Role.MLA_Q_B: 4,
            Role.MLA_KV_A: 5,
            Role.MLA_OUT: 5,
            Role.INDEX_Q: 5,
            Role.HEAD: 6,
            Role.MTP_IN: 4,
        },
        dtype=torch.float16,
        fused_kda=True,
        shared_gate_scales=False,
        pull=0.65,
    ),
}

DRAFT_BF16 = Recipe(Codebook.MUL1, {}, torch.bfloat16, fused_kda=False, shared_gate_scales=True)
DRAFT_EXL3 = Recipe(
    Codebook.MUL1, {Role.DRAFT: 6}, torch.float16, fused_kda=False, shared_gate_scales=True
)


@dataclass(frozen=True)
class RandomStreams:
    """Random values of a tensor, from the seed of the checkpoint and the tensor's name."""

    seed: int

    def generator(self, name: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))

    def normal(self, name: str, *shape: int) -> Tensor:
        """fp32 standard normal values."""
        return torch.from_numpy(self.generator(name).standard_normal(shape, dtype=np.float32))

    def uniform(self, name: str, *shape: int) -> Tensor:
        """fp32 values in [0, 1)."""
        return torch.from_numpy(self.generator(name).random(shape, dtype=np.float32))

    def signs(self, name: str, *shape: int) -> Tensor:
        """fp32 -1 or +1."""
        bits = self.generator(name).integers(0, 2, shape, dtype=np.int8)
        return torch.from_numpy(bits.astype(np.float32) * 2 - 1)

    def trellis(self, name: str, *shape: int) -> Tensor:
        """int16 trellis words; every bit pattern is a legal trellis."""
        words = self.generator(name).integers(-(1 << 15), 1 << 15, shape, dtype=np.int16)
        return torch.from_numpy(words)


def bf16_exact(values: Tensor) -> Tensor:
    """fp32 values rounded to what bf16 can hold.

    Tensors that one reader keeps in fp32 and another casts to bf16 (the mHC weights, the indexer's
    position bias) are the same number for both.
    """
    return values.to(torch.bfloat16).to(torch.float32)
