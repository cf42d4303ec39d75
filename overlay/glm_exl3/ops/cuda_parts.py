"""Several matrices times the same few tokens in one launch of the CUDA back end.

The launch writes every product into its columns of one output, so nothing is laid together
afterwards. A packed part has the bits of its own `linear`; dense rows are summed in fp32 in another
order than the vendor's product. What the kernel does not take is multiplied apart, and where all of
it is the vendor's product, that too goes straight into its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glm_exl3.ops import cuda_backend, dense_rows, reference, tuning
from glm_exl3.ops.matrix import PackedMatrix
from glm_exl3.ref.linear import exl3_parts_apart

FEW_TOKENS = 8  # kPartsTokens of the kernel
MOST_PARTS = 4  # kMostParts
STORED = 4  # numbers that the kernel stores at once, so columns and rows start at multiples
ALIGNED_BYTES = 16  # where the vendor's product needs an output's rows to start for its best kernel


def parts(
    x: torch.Tensor, matrices: Sequence[PackedMatrix | torch.Tensor], limit: float | None = None
) -> torch.Tensor:
    """x [..., k] -> the products side by side [..., sum of n] in x.dtype.

    A `limit` (infinity: no clamp) asks for the clamped SwiGLU of two packed matrices, gate and up,
    in place of both: [..., n].
    """
    rows = x.reshape(-1, x.shape[-1])
    if not 0 < rows.shape[0] <= FEW_TOKENS or not takes(matrices, x.dtype, gated=limit is not None):
        if limit is None:
            return side_by_side(x, matrices)
        return exl3_parts_apart([_alone(x, matrix) for matrix in matrices], limit)
    rows = rows.contiguous()
    if rows.data_ptr() % 16:  # a row of some wider tensor
        rows = rows.clone()
    widths = [_width(matrix) for matrix in matrices]
    width = sum(widths) if limit is None else widths[0]
    out = torch.empty(rows.shape[0], width, dtype=x.dtype, device=x.device)
    for launch in _launches(matrices, widths):
        launch.run(rows, out, limit)
    return out.reshape(*x.shape[:-1], width)


def side_by_side(
    x: torch.Tensor, matrices: Sequence[PackedMatrix | torch.Tensor], own_rows: bool = False
) -> torch.Tensor:
    """x [..., k] -> every product by itself, side by side [..., sum of n] in x.dtype.

    With `own_rows` few tokens of a dense matrix are `dense_rows`'. The bits are those of the
    products laid together afterwards, which is done unless the vendor multiplies all of them.
    """
    rows, widths = x.reshape(-1, x.shape[-1]), [_width(matrix) for matrix in matrices]
    aligned = all(width * x.element_size() % ALIGNED_BYTES == 0 for width in widths)
    if not aligned or not all(_by_vendor(rows, matrix, own_rows) for matrix in matrices):
        return exl3_parts_apart([_alone(x, matrix, own_rows) for matrix in matrices])
    out = torch.empty(rows.shape[0], sum(widths), dtype=x.dtype, device=x.device)
    for matrix, columns in zip(matrices, out.split(widths, dim=1), strict=True):
        if isinstance(matrix, torch.Tensor):
            torch.mm(rows, matrix.t(), out=columns)
        else:
            torch.mm(rows, cuda_backend.dequant(matrix, x.dtype), out=columns)
    return out.reshape(*x.shape[:-1], sum(widths))


def _by_vendor(rows: torch.Tensor, matrix: PackedMatrix | torch.Tensor, own_rows: bool) -> bool:
    if isinstance(matrix, torch.Tensor):
        return not (own_rows and dense_rows.can_serve(rows, matrix))
    return cuda_backend.streamed(matrix, rows.shape[0]) is None


def takes(
    matrices: Sequence[PackedMatrix | torch.Tensor], dtype: torch.dtype, *, gated: bool
) -> bool:
    """Whether the kernel has these matrices: fast rates, one dense matrix of the tokens' type.

    Gate and up must be packed alike. Not when the table sends few tokens of a part elsewhere.
    """
    packed = [m for m in matrices if isinstance(m, PackedMatrix)]
    dense = [m for m in matrices if isinstance(m, torch.Tensor)]
    if not packed or len(dense) > 1 or len({_inputs(m) for m in matrices}) > 1:
        return False
    short = dtype in (torch.bfloat16, torch.float16)
    if dense and (dtype != dense[0].dtype or not short or dense[0].shape[0] % STORED):
        return False
    alike = len({(m.trellis.shape, m.codebook) for m in packed}) == 1
    if gated and (dense or len(packed) != 2 or not alike):
        return False
    return all(
        cuda_backend.has_fast_kernel(m.trellis, m.codebook)
        and cuda_backend._step("linear", m, FEW_TOKENS).path == tuning.STREAMED
        for m in packed
    )


def _alone(
    x: torch.Tensor, matrix: PackedMatrix | torch.Tensor, own_rows: bool = False
) -> torch.Tensor:
    if isinstance(matrix, torch.Tensor):
        return dense_rows.linear(x, matrix) if own_rows else reference.dense_linear(x, matrix)
    return cuda_backend.linear(x, matrix)


def _width(matrix: PackedMatrix | torch.Tensor) -> int:
    return matrix.shape[0] if isinstance(matrix, torch.Tensor) else matrix.out_features


def _inputs(matrix: PackedMatrix | torch.Tensor) -> int:
    return matrix.shape[1] if isinstance(matrix, torch.Tensor) else matrix.in_features


@dataclass
class _Launch:
    """Matrices of one rate and codebook with their first columns, dense rows beside them."""

    packed: list[tuple[int, PackedMatrix]]
    dense: tuple[int, torch.Tensor] | None = None

    def run(self, rows: torch.Tensor, out: torch.Tensor, limit: float | None) -> None:
        ops, tokens = cuda_backend._ops(), rows.shape[0]
        matrices = [matrix for _, matrix in self.packed]
        columns = [column for column, _ in self.packed]
        size_bytes = sum(
            ops.linear_decode_workspace(tokens, m.in_features, m.out_features) for m in matrices
        )
        ops.linear_parts(
            rows,
            [m.trellis for m in matrices],
            [m.suh for m in matrices],
            [m.svh for m in matrices],
            cuda_backend._CODES[matrices[0].codebook],
            None if self.dense is None else self.dense[1],
            columns if self.dense is None else [*columns, self.dense[0]],
            [cuda_backend._step("linear", m, tokens).split_k for m in matrices],
            limit,
            [cuda_backend._linear_counters(m) for m in matrices],
            cuda_backend._scratch(rows.device, size_bytes),
            out,
        )


def _launches(
    matrices: Sequence[PackedMatrix | torch.Tensor], widths: Sequence[int]
) -> list[_Launch]:
    """As few launches as rates and codebooks allow."""
    launches: dict[tuple[object, ...], list[_Launch]] = {}
    dense: tuple[int, torch.Tensor] | None = None
    column = 0
    for matrix, width in zip(matrices, widths, strict=True):
        if isinstance(matrix, torch.Tensor):
            dense = (column, matrix)
        else:
            kind = (matrix.trellis.shape[-1], matrix.codebook)
            found = launches.setdefault(kind, [_Launch([])])
            if len(found[-1].packed) == MOST_PARTS:
                found.append(_Launch([]))
            found[-1].packed.append((column, matrix))
        column += width
    flat = [launch for found in launches.values() for launch in found]
    flat[0].dense = dense
    return flat
