"""vLLM's `GateLinear` whose logits of few tokens come from the kernel of bf16 rows.

Routed experts wait for these logits, so the kernel starts before its inputs are there and its
blocks come before those of the shared expert, which runs beside. What it does not serve is the
parent's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs as vllm_envs
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

from glm_exl3.ops import dense_rows


class RowsGate(GateLinear):
    """The gate of routed experts."""

    def forward(self, x: torch.Tensor) -> Any:
        """x [T, H] -> logits [T, E] in `out_dtype` or that of x, and no bias, as the parent."""
        logits = self._logits(x)
        return super().forward(x) if logits is None else self._return(logits)

    def _logits(self, x: torch.Tensor) -> torch.Tensor | None:
        plain = self.is_unquantized and self.bias is None and not vllm_envs.VLLM_BATCH_INVARIANT
        if not plain or x.dim() != self.weight.dim():
            return None
        return dense_rows.logits(x, self.weight, self.out_dtype or x.dtype)
