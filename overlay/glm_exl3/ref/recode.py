"""Eight bits per weight with one scale per output channel: fp8 (e4m3) and int8.

The codes of both are exact in bf16, so a product is `(x @ codes^T) * scale` whatever the kernel:
weight-only, activations stay as they are. Given `amax`, every row depends on its own values only,
so shards of a matrix get the codes of the whole if they are given its row maxima.
"""

from __future__ import annotations

import torch

FP8_MAX = 448.0
INT8_MAX = 127.0
LEAST_SCALE = 1e-12
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def row_maxima(weight: torch.Tensor) -> torch.Tensor:
    """max |w| of every row: [n, k] -> fp32 [n]."""
    low, high = torch.aminmax(weight, dim=-1)
    return torch.maximum(low.abs(), high.abs()).to(torch.float32)


def quantize_rows(
    weight: torch.Tensor, scheme: str, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [n, k] -> codes [n, k] (e4m3 or int8) and scale fp32 [n]; nearest, ties to even.

    `amax` fp32 [n] are the maxima of the whole rows where `weight` is a part of them. Raises
    ValueError for another scheme.
    """
    if scheme not in DTYPES:
        raise ValueError(f"{scheme}: known are {', '.join(DTYPES)}")
    top = FP8_MAX if scheme == "fp8" else INT8_MAX
    scale = ((row_maxima(weight) if amax is None else amax) / top).clamp_min(LEAST_SCALE)
    codes = torch.empty(weight.shape, dtype=DTYPES[scheme], device=weight.device)
    rows = max(1, (1 << 24) // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        value = (weight[part].to(torch.float32) / scale[part, None]).clamp_(-top, top)
        codes[part] = (value.round_() if scheme == "int8" else value).to(codes.dtype)
    return codes, scale


def dequantize_rows(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [n, k]."""
    return codes.to(torch.float32) * scale[:, None]


def linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [..., k] -> [..., n] in x.dtype; fp32 inside."""
    product = x.to(torch.float32) @ codes.to(torch.float32).t()
    return (product * scale).to(x.dtype)


def linear_of_quantized_rows(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """The same with activations in e4m3, too, one scale per token: what tensor cores multiply."""
    codes_x, scale_x = quantize_rows(x.reshape(-1, x.shape[-1]), "fp8")
    product = codes_x.to(torch.float32) @ codes.to(torch.float32).t()
    result = product * scale_x[:, None] * scale
    return result.to(x.dtype).reshape(*x.shape[:-1], codes.shape[0])
