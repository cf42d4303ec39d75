"""The custom operations `torch.ops.glm_exl3.*`.

They exist so that compiled graphs treat a packed product as one node: each has a fake twin that
gives shape and dtype without running. The back end travels as its name and is resolved from the
table, so an exported graph says what it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from glm_exl3.format.layout import TILE, Codebook
from glm_exl3.ops import table
from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix

Matrix: TypeAlias = PackedMatrix | torch.Tensor
DENSE = "dense"  # the kind of a dense matrix; packed ones have their codebook's name

_LIBRARY = torch.library.Library("glm_exl3", "FRAGMENT")

_LIBRARY.define(
    "exl3_linear(Tensor x, Tensor trellis, Tensor suh, Tensor svh, str codebook, str backend)"
    " -> Tensor"
)
_LIBRARY.define(
    "exl3_parts(Tensor x, Tensor[] tensors, str[] kinds, float? limit, str backend) -> Tensor"
)
_LIBRARY.define(
    "exl3_side_by_side(Tensor x, Tensor[] tensors, str[] kinds, bool own_rows, str backend)"
    " -> Tensor"
)
_LIBRARY.define(
    "exl3_dequant(Tensor trellis, Tensor suh, Tensor svh, str codebook, ScalarType dtype,"
    " str backend) -> Tensor"
)
_LIBRARY.define("had128(Tensor x, Tensor? pre, Tensor? post, str backend) -> Tensor")
_LIBRARY.define("exl3_encode(Tensor tiles, int bits, str codebook, str backend) -> Tensor")
_LIBRARY.define(
    "exl3_moe(Tensor x, Tensor topk_ids, Tensor topk_weights,"
    " Tensor w13_trellis, Tensor w13_suh, Tensor w13_svh, str w13_codebook,"
    " Tensor w2_trellis, Tensor w2_suh, Tensor w2_svh, str w2_codebook,"
    " float? limit, Tensor? expert_map, str backend) -> Tensor"
)


def _linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    backend: str,
) -> torch.Tensor:
    matrix = PackedMatrix(trellis, suh, svh, Codebook(codebook))
    result: torch.Tensor = table.row(backend).load().linear(x, matrix)
    return result


def _linear_fake(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    backend: str,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], trellis.shape[1] * TILE))


def _matrices(tensors: Sequence[torch.Tensor], kinds: Sequence[str]) -> list[Matrix]:
    """The matrices of `_flat`: three tensors of a packed one, one of a dense one."""
    rest, found = iter(tensors), list[Matrix]()
    for kind in kinds:
        first = next(rest)
        if kind == DENSE:
            found.append(first)
        else:
            found.append(PackedMatrix(first, next(rest), next(rest), Codebook(kind)))
    return found


def _widths(tensors: Sequence[torch.Tensor], kinds: Sequence[str]) -> list[int]:
    return [
        m.shape[0] if isinstance(m, torch.Tensor) else m.out_features
        for m in _matrices(tensors, kinds)
    ]


def _flat(matrices: Sequence[Matrix]) -> tuple[list[torch.Tensor], list[str]]:
    """Tensors and kinds of matrices, as an operation's schema takes them."""
    tensors, kinds = list[torch.Tensor](), list[str]()
    for matrix in matrices:
        dense = isinstance(matrix, torch.Tensor)
        tensors += [matrix] if dense else [matrix.trellis, matrix.suh, matrix.svh]
        kinds.append(DENSE if dense else matrix.codebook.value)
    return tensors, kinds


def _parts(
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    kinds: list[str],
    limit: float | None,
    backend: str,
) -> torch.Tensor:
    module = table.row(backend).load()
    result: torch.Tensor = module.parts(x, _matrices(tensors, kinds), limit)
    return result


def _parts_fake(
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    kinds: list[str],
    limit: float | None,
    backend: str,
) -> torch.Tensor:
    widths = _widths(tensors, kinds)
    return x.new_empty((*x.shape[:-1], sum(widths) if limit is None else widths[0]))


def _side_by_side(
    x: torch.Tensor, tensors: list[torch.Tensor], kinds: list[str], own_rows: bool, backend: str
) -> torch.Tensor:
    module = table.row(backend).load()
    result: torch.Tensor = module.side_by_side(x, _matrices(tensors, kinds), own_rows)
    return result


def _side_by_side_fake(
    x: torch.Tensor, tensors: list[torch.Tensor], kinds: list[str], own_rows: bool, backend: str
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], sum(_widths(tensors, kinds))))


def _dequant(
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    matrix = PackedMatrix(trellis, suh, svh, Codebook(codebook))
    result: torch.Tensor = table.row(backend).load().dequant(matrix, dtype)
    return result


def _dequant_fake(
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return trellis.new_empty((trellis.shape[0] * TILE, trellis.shape[1] * TILE), dtype=dtype)


def _had128(
    x: torch.Tensor, pre: torch.Tensor | None, post: torch.Tensor | None, backend: str
) -> torch.Tensor:
    result: torch.Tensor = table.row(backend).load().had128(x, pre, post)
    return result


def _had128_fake(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _encode(tiles: torch.Tensor, bits: int, codebook: str, backend: str) -> torch.Tensor:
    result: torch.Tensor = table.row(backend).load().encode(tiles, bits, Codebook(codebook))
    return result


def _encode_fake(tiles: torch.Tensor, *rest: object) -> torch.Tensor:
    return tiles.new_empty(tiles.shape, dtype=torch.int32)


def _moe(  # noqa: PLR0913, PLR0917 - an operation's schema is flat: tensors, not objects
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13_trellis: torch.Tensor,
    w13_suh: torch.Tensor,
    w13_svh: torch.Tensor,
    w13_codebook: str,
    w2_trellis: torch.Tensor,
    w2_suh: torch.Tensor,
    w2_svh: torch.Tensor,
    w2_codebook: str,
    limit: float | None,
    expert_map: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    w13 = Exl3Stack(w13_trellis, w13_suh, w13_svh, Codebook(w13_codebook))
    w2 = Exl3Stack(w2_trellis, w2_suh, w2_svh, Codebook(w2_codebook))
    module = table.row(backend).load()
    result: torch.Tensor = module.moe(x, topk_ids, topk_weights, w13, w2, limit, expert_map)
    return result


def _moe_fake(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(x)


for _name, _run, _fake in (
    ("exl3_linear", _linear, _linear_fake),
    ("exl3_parts", _parts, _parts_fake),
    ("exl3_side_by_side", _side_by_side, _side_by_side_fake),
    ("exl3_dequant", _dequant, _dequant_fake),
    ("had128", _had128, _had128_fake),
    ("exl3_encode", _encode, _encode_fake),
    ("exl3_moe", _moe, _moe_fake),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"glm_exl3::{_name}", _fake, lib=_LIBRARY)


def linear(x: torch.Tensor, matrix: PackedMatrix, backend: str) -> torch.Tensor:
    """x [..., k] -> [..., n] in x.dtype through the operation."""
    result: torch.Tensor = torch.ops.glm_exl3.exl3_linear(
        x, matrix.trellis, matrix.suh, matrix.svh, matrix.codebook.value, backend
    )
    return result


def parts(
    x: torch.Tensor, matrices: Sequence[Matrix], limit: float | None, backend: str
) -> torch.Tensor:
    """x [..., k] -> the products side by side in x.dtype through one operation.

    With a `limit` (infinity: no clamp) the two are gate and up and it gives their clamped SwiGLU.
    """
    result: torch.Tensor = torch.ops.glm_exl3.exl3_parts(x, *_flat(matrices), limit, backend)
    return result


def side_by_side(
    x: torch.Tensor, matrices: Sequence[Matrix], own_rows: bool, backend: str
) -> torch.Tensor:
    """x [..., k] -> the separate products side by side in x.dtype through one operation.

    With `own_rows` few tokens of a dense matrix are `dense_rows`' where the back end has kernels.
    """
    result: torch.Tensor = torch.ops.glm_exl3.exl3_side_by_side(
        x, *_flat(matrices), own_rows, backend
    )
    return result


def dequant(matrix: PackedMatrix, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """W [k, n] in `dtype` through the operation."""
    result: torch.Tensor = torch.ops.glm_exl3.exl3_dequant(
        matrix.trellis, matrix.suh, matrix.svh, matrix.codebook.value, dtype, backend
    )
    return result


def had128(
    x: torch.Tensor, pre: torch.Tensor | None, post: torch.Tensor | None, backend: str
) -> torch.Tensor:
    """had128(x * pre) * post over the last dimension, x.dtype out, through the operation."""
    result: torch.Tensor = torch.ops.glm_exl3.had128(x, pre, post, backend)
    return result


def encode(tiles: torch.Tensor, bits: int, codebook: Codebook, backend: str) -> torch.Tensor:
    """tiles [..., 256] -> int32 [..., 256]: states, a closed ring per tile, by the operation."""
    result: torch.Tensor = torch.ops.glm_exl3.exl3_encode(tiles, bits, codebook.value, backend)
    return result


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: Exl3Stack,
    w2: Exl3Stack,
    *,
    limit: float | None,
    expert_map: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """Routed sum [T, H] of this rank through the operation."""
    result: torch.Tensor = torch.ops.glm_exl3.exl3_moe(
        x,
        topk_ids,
        topk_weights,
        w13.trellis,
        w13.suh,
        w13.svh,
        w13.codebook.value,
        w2.trellis,
        w2.suh,
        w2.svh,
        w2.codebook.value,
        limit,
        expert_map,
        backend,
    )
    return result
