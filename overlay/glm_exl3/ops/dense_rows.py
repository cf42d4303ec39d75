"""Products of few tokens with a bf16 matrix: rows of bf16 in the kernel of the 8-bit rows.

The operation is one node of a compiled graph for any number of tokens and decides when it runs:
what the kernel does not serve is `reference.dense_linear`, the vendor's product, which is also its
twin. Up to sixteen tokens their number does not change a token's bits. Nothing is copied: rows are
read where the weight lies, tokens may be a slice of wider rows.
"""

from __future__ import annotations

import torch

from glm_exl3.ops import ext, fused_names, recoded, reference

NAME = "dense"  # among the fused ops
ALIGNED_BYTES = 16  # what a lane loads at once

_LIBRARY = torch.library.Library("glm_exl3", "FRAGMENT")
_LIBRARY.define("dense_rows(Tensor x, Tensor weight) -> Tensor")


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., k] with weight [n, k] -> [..., n] in x.dtype, sums in fp32, through the operation."""
    result: torch.Tensor = torch.ops.glm_exl3.dense_rows(x, weight)
    return result


def in_use() -> bool:
    """Whether it is among the fused ops of this process."""
    return NAME in fused_names.wanted()


def can_serve(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the CUDA kernel can run and serves x [t, k] with weight [n, k]."""
    return (
        weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and x.shape[0] > 0
        and x.shape[1] == weight.shape[1]
        and recoded.can_stream(x, weight.element_size())
        and weight.data_ptr() % ALIGNED_BYTES == 0
        and _rows_are_aligned(x)
    )


def _rows_are_aligned(x: torch.Tensor) -> bool:
    step = x.stride(0) * x.element_size() if x.shape[0] > 1 else 0
    return x.stride(1) == 1 and step % ALIGNED_BYTES == 0 and x.data_ptr() % ALIGNED_BYTES == 0


def logits(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """x [t, k] with a gate [experts, k] -> [t, experts] in fp32 or x.dtype, or None where the
    kernel cannot; its blocks come before those of other streams."""
    if not can_serve(x, weight) or dtype not in {x.dtype, torch.float32}:
        return None
    return _served(x, weight, dtype, urgent=True)


def _served(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, *, urgent: bool
) -> torch.Tensor:
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    ext.operators().dense_rows(x, weight, urgent, y)
    return y


def _dense_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if not can_serve(rows, weight):
        return reference.dense_linear(x, weight)
    y = _served(rows, weight, x.dtype, urgent=False)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _dense_rows_fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_LIBRARY.impl("dense_rows", _dense_rows, "CompositeExplicitAutograd")
torch.library.register_fake("glm_exl3::dense_rows", _dense_rows_fake, lib=_LIBRARY)
