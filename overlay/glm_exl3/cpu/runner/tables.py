"""Block tables and staged writes of the second model runner, without kernels.

Why numpy: a step touches a handful of small integer arrays; numpy views of the (CPU) tensors write
them in place at a fraction of the cost of tensor operations. Each function replaces the vLLM method
of the same name and keeps its contract.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

PAD_SLOT = -1


def apply_write(self: Any) -> None:
    """`StagedWriteTensor.apply_write`: copy the staged rows into the tensor, then forget them."""
    if not self._staged_write_indices:
        return
    target = self.gpu.numpy()
    begin = 0
    for row, start, end in zip(
        self._staged_write_indices,
        self._staged_write_starts,
        self._staged_write_cu_lens,
        strict=True,
    ):
        values = self._staged_write_contents[begin:end]
        if target.ndim == 1:
            target[row + start : row + start + len(values)] = values
        else:
            target[row, start : start + len(values)] = values
        begin = end
    self.clear_staged_writes()


def apply_fused(self: Any, tensors: Any, output_ptrs: Tensor, output_strides: Tensor) -> None:
    """`FusedStagedWriter.apply`: the same for the tables of all cache groups."""
    for tensor in tensors:
        tensor.apply_write()


def gather_block_tables(
    self: Any,
    idx_mapping: Tensor,
    num_reqs_padded: int,
    out: tuple[Tensor, ...] | None = None,
    out_ptrs: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """`BlockTables.gather_block_tables`: rows of the batch, padded rows zero.

    With `num_computed_tokens`, entries wholly below the window of a sliding-window group become
    the null block, since their blocks may belong to another request by now.
    """
    count = idx_mapping.shape[0]
    rows = num_reqs_padded
    if out is None:
        out = tuple(self.input_block_tables)
        rows = max(rows, self._num_dirty_rows)
        self._num_dirty_rows = count
    requests = idx_mapping.tolist()
    for group, table in enumerate(out):
        source = self.block_tables[group].gpu.numpy()
        target = table.numpy()
        reach = self._sliding_window_reach[group]
        for row, request in enumerate(requests):
            used = int(self.num_blocks.np[group, request])
            target[row, :used] = source[request, :used]
            if reach > 0 and num_computed_tokens is not None:
                first = max(int(num_computed_tokens[request]) - reach, 0)
                target[row, : min(first // self.block_sizes[group], used)] = 0
        target[count:rows] = 0
    return tuple(table[:num_reqs_padded] for table in out)


def compute_slot_mappings(
    self: Any,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    num_tokens_padded: int,
    out: Tensor | None = None,
) -> Tensor:
    """`BlockTables.compute_slot_mappings`: cache slot of every token per group, -1 as padding."""
    mappings = self.slot_mappings if out is None else out
    requests = idx_mapping.tolist()
    starts = query_start_loc.tolist()
    places = positions.numpy()
    target = mappings.numpy()
    total = starts[len(requests)]
    for group in range(self.num_kv_cache_groups):
        target[group, total:] = PAD_SLOT
        block = self.block_sizes[group]
        table = self.block_tables[group].gpu.numpy()
        enabled = self._slot_mapping_enabled[group]
        for row, request in enumerate(requests):
            part = slice(starts[row], starts[row + 1])
            if request < 0 or not enabled:
                target[group, part] = PAD_SLOT
                continue
            place = places[part]
            blocks = table[request, place // block].astype(np.int64)
            target[group, part] = blocks * block + place % block
    return mappings[:, :num_tokens_padded]


def compressed_slot_mapping(  # noqa: PLR0913, PLR0917 - vLLM's signature
    self: Any,
    compressed: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    compress_ratio: int,
    dcp_world_size: int,
    cp_interleave: int,
) -> None:
    """`CompressedSlotMappingKernel.__call__`: slot of a state at its last token, -1 elsewhere."""
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for row in range(min(block_table.shape[0], len(starts) - 1)):
        size = starts[row + 1] - starts[row]
        if size <= 0:
            continue
        place = torch.arange(lengths[row] - size, lengths[row])
        part = slice(starts[row], starts[row + 1])
        valid = ((place + 1) % compress_ratio == 0) & (slot_mapping[part] != PAD_SLOT)
        state = place.clamp_min(0) // compress_ratio
        blocks = block_table[row, (state // block_size).clamp_max(block_table.shape[1] - 1)].long()
        compressed[part] = torch.where(valid, blocks * block_size + state % block_size, PAD_SLOT)
