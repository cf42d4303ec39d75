"""Weight edits: changes to matrices in memory, after they are read and before they are used.

An edit says which matrices it wants and returns what a rank's part of each becomes. It is asked
once per matrix on every rank, for that rank's part only, and must not talk to other ranks: where a
change needs rows or columns of another rank, the edit refuses. Nothing on disk changes.

Matrices go by their checkpoint name with the text model's prefix, whatever vLLM merges them into:
`model.layers.15.self_attn.o_proj`, `model.layers.45.eh_proj`, `lm_head`; those of a drafter with
`draft.` in front. Offered is every two-dimensional weight of a linear layer and of the head. Not
offered are routed experts, embeddings, norms and convolutions; an edit that wants only those has
nothing to change and is an error, as is every edit that changed nothing in a model it is meant for.

A packed matrix is decoded for the edit and encoded again with the scales and the rate it had.

Edits are registered while the plugin starts, before the digest that ranks compare is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.layout import Codebook
from glm_exl3.format.sharding import Cut

ROLES = ("target", "mtp", "draft")
"""The models of one engine: the text model, the MTP block behind it, a drafter of its own."""


@dataclass(frozen=True)
class Packing:
    """How a packed matrix is stored: K bits per weight and the codebook."""

    bits: float
    codebook: Codebook


@dataclass(frozen=True)
class Placement:
    """Where a rank's part lies in the whole matrix W [out, in], in features of the whole.

    The part is `W[out.start:out.stop, inputs.start:inputs.stop]`; padding of a cut is never shown.
    `packing` is None for a dense matrix; then the part has the model's dtype, otherwise it is fp32.
    """

    out: Cut
    inputs: Cut
    packing: Packing | None = None

    def whole_rows(self, full_shape: tuple[int, int]) -> bool:
        """Whether the part has all `in` features of the rows it holds."""
        return self.inputs.width == full_shape[1]

    def whole_columns(self, full_shape: tuple[int, int]) -> bool:
        """Whether the part has all `out` features of the columns it holds."""
        return self.out.width == full_shape[0]


@runtime_checkable
class WeightEdit(Protocol):
    """One edit.

    `name` is how users know it; `digest` names its data and settings and must be equal on all
    ranks; `roles` are the models it is meant for.
    """

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def roles(self) -> frozenset[str]: ...

    def wants(self, module: str) -> bool:
        """Whether the edit may change `module`; cheap, asked before anything is decoded."""
        ...

    def edit(
        self,
        module: str,
        full_shape: tuple[int, int],
        shard: torch.Tensor,
        placement: Placement,
    ) -> torch.Tensor | None:
        """What `shard` becomes, or None to leave it.

        `full_shape` is (out, in) of the whole matrix, `shard` [out, in] this rank's part on its
        device; it may be read but not written. The answer has the same shape. Raises GlmExl3Error,
        best by `refused`, where the edit is not possible.
        """
        ...


_registered: dict[str, WeightEdit] = {}


def register(edit: WeightEdit) -> None:
    """Add an edit behind those that are registered. Raises GlmExl3Error for a name that is taken
    or a role that does not exist."""
    unknown = sorted(edit.roles - set(ROLES))
    twice = edit.name in _registered
    if twice or unknown or not edit.roles:
        what = "registered already" if twice else f"for {', '.join(unknown) or 'no model'}"
        raise GlmExl3Error(
            code="edit",
            seen=f"edit {edit.name} is {what}",
            why="the same change made twice, or for no model, is not what was asked for",
            fix=f"register it once, for some of {', '.join(ROLES)}",
        )
    _registered[edit.name] = edit


def registered() -> tuple[WeightEdit, ...]:
    """The edits in the order in which they are applied."""
    return tuple(_registered.values())


def clear() -> None:
    """Forget every edit."""
    _registered.clear()


def digest_entry() -> str:
    """What ranks compare: `name:digest` of every edit in order, or `-`."""
    return ",".join(f"{edit.name}:{edit.digest}" for edit in registered()) or "-"


def refused(edit: WeightEdit, module: str, seen: str, fix: str) -> GlmExl3Error:
    """The error of an edit that cannot change a matrix it wants."""
    return GlmExl3Error(
        code="edit-refused",
        seen=f"edit {edit.name} cannot change {module}: {seen}",
        why="weights without the edit would be served as if they had it",
        fix=fix,
    )


def checked(
    edit: WeightEdit, module: str, before: torch.Tensor, after: torch.Tensor
) -> torch.Tensor:
    """`after` if it can take the place of `before`. Raises GlmExl3Error."""
    if after.shape == before.shape and bool(torch.isfinite(after).all()):
        return after
    raise GlmExl3Error(
        code="edit",
        seen=f"edit {edit.name} made of {module}, {tuple(before.shape)} on this rank, "
        f"{tuple(after.shape)} with {int((~torch.isfinite(after)).sum())} values not finite",
        why="such weights cannot be served",
        fix="report the edit; switch it off to serve the plain weights",
    )
