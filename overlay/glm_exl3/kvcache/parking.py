"""Host parking for the CPU engine: vLLM's offload connector with copies that a CPU can make.

vLLM parks idle prefixes in host memory through its `OffloadingConnector`. Its scheduler half runs
anywhere; its worker half copies on CUDA streams and refuses a CPU. This one copies at once, so that
look-up, eviction and the way back can be tested without a GPU. Chosen by
`kv_connector_extra_config`: `spec_name` and `spec_module_path` of this module.

What must stay true: one pool block is one parked chunk (`blocks_per_chunk` 1). A job is finished
when `submit_*` returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostWorker(OffloadingWorker):
    """Parked blocks as rows of plain tensors, one tensor per region of the pool."""

    def __init__(self, regions: list[Tensor], groups: list[list[tuple[int, int]]], chunks: int):
        """`regions` `[blocks, bytes]` int8; per group its (region, bytes) pairs."""
        self._regions = regions
        self._groups = groups
        self._parked = [
            torch.zeros((chunks, region.shape[1]), dtype=torch.int8) for region in regions
        ]
        self._done: list[TransferResult] = []

    @override
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, store=True)

    @override
    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, store=False)

    @override
    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    @override
    def wait(self, job_ids: set[int]) -> None:
        """Nothing: every job is finished when it was submitted."""

    def _copy(self, job_id: int, pool: Any, chunks: Any, *, store: bool) -> bool:
        position, moved = 0, 0
        for references, count in zip(self._groups, pool.group_sizes, strict=True):
            mine = slice(position, position + count)
            position += count
            blocks = torch.as_tensor(pool.block_ids[mine], dtype=torch.int64)
            rows = torch.as_tensor(chunks[mine], dtype=torch.int64)
            for region, size in references:
                inside, outside = self._regions[region], self._parked[region]
                if store:
                    outside[rows, :size] = inside[blocks, :size]
                else:
                    inside[blocks, :size] = outside[rows, :size]
                moved += size * count
        self._done.append(TransferResult(job_id, True, moved, 1e-9))
        return True


class HostParkingSpec(CPUOffloadingSpec):
    """vLLM's own bookkeeping of parked chunks over the worker above."""

    _worker: OffloadingWorker | None

    @override
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            self._worker = HostWorker(
                [one.tensor for one in kv_caches.tensors],
                [
                    [(one.tensor_idx, one.page_size_bytes) for one in group]
                    for group in kv_caches.group_data_refs
                ],
                self.num_chunks,
            )
        return self._worker
