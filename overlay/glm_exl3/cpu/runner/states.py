"""State blocks of the KDA layers in "align" mode: the moves at block boundaries.

With prefix caching, a KDA state lives in the block of its last token, and a request that enters a
new block takes its state along. vLLM hands its kernels addresses; these functions copy bytes
between the same addresses. Names of arguments are those of the kernels in `v1.worker.mamba_utils`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where one state tensor lies: bytes, but `inner` in elements and `conv_width` in tokens."""

    base: int
    block_stride: int
    element: int
    inner: int
    conv_width: int
    group: int
    dim_rows: int
    row_stride: int


def layouts(context: Any) -> list[Layout]:
    """Read the layout tensors of vLLM's `MambaSpecDecodeGPUContext`."""
    columns = (
        context.state_base_addrs,
        context.state_block_strides,
        context.state_elem_sizes,
        context.state_inner_sizes,
        context.state_conv_widths,
        context.state_group_indices,
        context.state_dim_row_count,
        context.state_dim_row_stride,
    )
    return [Layout(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _block(context: Any, group: int, request: int, column: int) -> int:
    address = int(context.block_table_ptrs[group])
    place = request * context.block_table_stride_req + column
    return ctypes.c_int32.from_address(address + 4 * place).value


def move_state(
    context: Any, layout: Layout, request: int, source: int, target: int, bias: int
) -> None:
    """Copy one state from block column `source` to `target`.

    A conv window is shifted by `bias` tokens; a recurrent state is taken from the column of the
    last accepted token, `source + bias`.
    """
    to = layout.base + _block(context, layout.group, request, target) * layout.block_stride
    if layout.conv_width == 0:
        column = _block(context, layout.group, request, source + bias)
        begin = layout.base + column * layout.block_stride
        ctypes.memmove(to, begin, layout.inner * layout.element)
        return
    begin = layout.base + _block(context, layout.group, request, source) * layout.block_stride
    kept = layout.conv_width - bias
    if layout.dim_rows:
        for row in range(layout.dim_rows):
            offset = row * layout.row_stride
            ctypes.memmove(
                to + offset, begin + offset + bias * layout.element, kept * layout.element
            )
        return
    token = layout.inner * layout.element
    ctypes.memmove(to, begin + bias * token, kept * token)


def _cached_layouts(context: Any) -> list[Layout]:
    found = context.__dict__.get("_glm_exl3_layouts")
    if found is None:
        found = layouts(context)
        context._glm_exl3_layouts = found
    return found


def advance_state_columns(  # noqa: PLR0913, PLR0917 - launch arguments of the kernel
    idx_mapping: Tensor,
    state_idx: Tensor,
    num_computed_tokens: Tensor,
    query_start_loc: Tensor,
    num_accepted_tokens: Tensor,
    src_col: Tensor,
    src_off: Tensor,
    num_reqs: int,
    BLOCK_SIZE: int = 0,  # noqa: N803 - launch argument
    MAMBA_BLOCK_SIZE: int = 1,  # noqa: N803 - launch argument
) -> None:
    """`preprocess_mamba_align_fused_kernel`: remember the old column, move to the new one."""
    requests = idx_mapping[:num_reqs].long()
    column, accepted = state_idx[requests], num_accepted_tokens[requests]
    src_col[requests] = column
    src_off[requests] = (accepted - 1).clamp_min(0).to(src_off.dtype)
    sizes = query_start_loc[: num_reqs + 1].diff()
    computed = num_computed_tokens[requests] + sizes
    new = ((computed + MAMBA_BLOCK_SIZE - 1) // MAMBA_BLOCK_SIZE - 1).to(state_idx.dtype)
    state_idx[requests] = new
    crossed = (column >= 0) & (column != new)
    num_accepted_tokens[requests] = torch.where(crossed, 1, accepted)


def run_fused_precopy(
    self: Any,
    num_reqs: int,
    state_idx_gpu: Tensor,
    src_col_gpu: Tensor,
    token_bias_gpu: Tensor,
    idx_mapping: Tensor | None,
) -> None:
    """`MambaSpecDecodeGPUContext.run_fused_precopy`: carry states into a new block."""
    if num_reqs == 0 or not self.is_initialized:
        return
    requests = range(num_reqs) if idx_mapping is None else idx_mapping[:num_reqs].tolist()
    for request in requests:
        if request < 0:
            continue
        source, target = int(src_col_gpu[request]), int(state_idx_gpu[request])
        if source < 0 or source == target:
            continue
        bias = int(token_bias_gpu[request])
        for layout in _cached_layouts(self):
            move_state(self, layout, request, source, target, bias)


def run_fused_postprocess_align(
    self: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Tensor,
    state_idx_gpu: Tensor,
    new_num_computed_tokens_gpu: Tensor,
    idx_mapping: Tensor,
) -> None:
    """`MambaSpecDecodeGPUContext.run_fused_postprocess_align`: keep the state at a boundary.

    When acceptance passed a block boundary, the state as of the boundary goes to that block.
    """
    if num_reqs == 0 or not self.is_initialized:
        return
    for request in idx_mapping[:num_reqs].tolist():
        if request < 0:
            continue
        computed, accepted = (
            int(new_num_computed_tokens_gpu[request]),
            int(num_accepted_tokens_gpu[request]),
        )
        running = computed - accepted + 1
        aligned = computed // self.block_size * self.block_size
        if aligned < running:
            continue
        bias, source = aligned - running, int(state_idx_gpu[request])
        target = aligned // self.block_size - 1
        if source == target:
            num_accepted_tokens_gpu[request] = 1
            if bias == 0:
                continue
        for layout in _cached_layouts(self):
            move_state(self, layout, request, source, target, bias)


def compute_aligned_state_indices(self: Any, seq_lens: Tensor, num_reqs: int) -> Tensor:
    """`MambaSpecDecodeGPUContext.compute_aligned_state_indices`: `[groups, R, 1 + k]` blocks."""
    out = self.aligned_state_indices
    slots = out.shape[2]
    columns = ((seq_lens[:num_reqs] - 1) // self.block_size).clamp_min(0).tolist()
    for group in range(self.num_groups):
        address = int(self.aligned_index_block_table_ptrs[group])
        for row, column in enumerate(columns):
            place = address + 4 * (row * self.block_table_stride_req + column)
            values = (ctypes.c_int32 * slots).from_address(place)
            out[group, row] = torch.tensor(list(values), dtype=out.dtype)
    return out[:, :num_reqs]


def align_block_table(  # noqa: PLR0913, PLR0917 - launch arguments of the kernel
    out: Tensor,
    block_table: Tensor,
    block_table_stride_0: int,
    block_table_stride_1: int,
    seq_lens: Tensor,
    seq_lens_stride: int,
    block_size: int,
    n_out: int,
    BLOCK: int = 0,  # noqa: N803 - launch argument
) -> None:
    """`_mamba_align_block_table_kernel`: the block of the last token and those behind it."""
    rows = out.shape[0]
    first = ((seq_lens[:rows] - 1) // block_size).clamp_min(0).long()
    columns = first[:, None] + torch.arange(n_out)
    columns = columns.clamp_max(block_table.shape[1] - 1)
    out.view(rows, n_out).copy_(block_table[:rows].gather(1, columns))


def zero_blocks(
    addresses: Tensor, strides: Tensor, sizes: Tensor, block_ids: Tensor, BLOCK_SIZE: int = 0
) -> None:  # noqa: N803 - launch argument
    """`_zero_kv_blocks_kernel`: clear new blocks; strides and sizes are in 4-byte words."""
    segments = list(zip(addresses.tolist(), strides.tolist(), sizes.tolist(), strict=True))
    for block in block_ids.tolist():
        for address, stride, size in segments:
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)
