"""Products with 8-bit rows (`glm_exl3.ref.recode`): which path serves how many tokens.

    streamed codes become bf16 in registers, up to 16 tokens of bf16; this project's CUDA kernel
    rows     the same in Triton, for any number of tokens and where that kernel cannot serve
    scaled   vLLM's product of e4m3 by e4m3, activations quantised per token (from 8.9 on)
    widened  codes become a bf16 matrix first, then the vendor's product

The table of `tuning` decides (`fp8` and `int8` are operations there), `GLM_EXL3_RECODE_PATH` can
insist on one for what is more than a few tokens. On the CPU codes are kept in bf16, which is exact,
and multiplied there; `scaled` has a twin that quantises the activations, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from glm_exl3 import envs
from glm_exl3.ops import ext, reference, tuning
from glm_exl3.ref import recode

STREAMED, ROWS, SCALED, WIDENED = tuning.STREAMED, "rows", "scaled", "widened"
NATIVE_FP8 = (8, 9)
ROWS_TOKENS = 256  # where `scaled` cannot serve, `widened` is slower up to so many
STREAMED_TOKENS, STREAMED_BYTES = 16, 64  # of csrc/byte_rows.h: tokens, unit of a row


@dataclass(frozen=True)
class RowCodes:
    """A matrix [n, k] as codes and scale fp32 [n]; `wide` is the fp32 copy for few rows on a CPU.

    On CUDA `codes` are e4m3 or int8; on the CPU their values in bf16.
    """

    scheme: str
    codes: torch.Tensor
    scale: torch.Tensor
    wide: torch.Tensor | None = None

    @property
    def held_bytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def encode_rows(weight: torch.Tensor, scheme: str, amax: torch.Tensor | None = None) -> RowCodes:
    """weight [n, k] -> what `linear` reads; `amax` as in `ref.recode.quantize_rows`."""
    codes, scale = recode.quantize_rows(weight, scheme, amax)
    if codes.device.type != "cuda":
        codes = codes.to(weight.dtype)
    return RowCodes(scheme, codes.contiguous(), scale, reference.widen(codes))


def linear(x: torch.Tensor, matrix: RowCodes) -> torch.Tensor:
    """x [..., k] -> [..., n] in x.dtype."""
    if x.device.type != "cuda":
        return _on_cpu(x, matrix)
    flat = x.reshape(-1, x.shape[-1])
    if not flat.shape[0]:
        return x.new_empty((*x.shape[:-1], matrix.codes.shape[0]))
    capability = torch.cuda.get_device_capability(x.device)
    path = path_for(matrix, capability, flat.shape[0])
    if path == STREAMED and not can_stream(flat):
        path = ROWS
    y = by_path(flat, matrix, path)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def path_for(matrix: RowCodes, capability: tuple[int, int], tokens: int) -> str:
    """The path of the table, or the one that is insisted on; `scaled` only where it exists."""
    n, k = matrix.codes.shape
    problem = tuning.Problem(matrix.scheme, k, n, 8, matrix.scheme)
    path = tuning.step(problem, capability, tokens).path
    wanted = envs.RECODE_PATH.read()
    if wanted != "auto" and tokens > tuning.ALIKE:
        path = wanted
    if path == SCALED and (matrix.scheme != "fp8" or capability < NATIVE_FP8):
        return ROWS if tokens <= ROWS_TOKENS else WIDENED
    return path


def can_stream(x: torch.Tensor, element_bytes: int = 1) -> bool:
    """Whether the CUDA kernel can run and serves the tokens, type and width of `x` [t, k].

    `element_bytes` is the size of a code, or of an element of dense rows.
    """
    whole = x.shape[1] * element_bytes % STREAMED_BYTES == 0
    few = x.shape[0] <= STREAMED_TOKENS and whole
    return few and x.dtype == torch.bfloat16 and ext.runs_on(x.device)


def by_path(x: torch.Tensor, matrix: RowCodes, path: str) -> torch.Tensor:
    """x [t, k] -> [t, n] by a named path on CUDA."""
    if path == STREAMED:
        return _streamed(x, matrix)
    if path == ROWS:
        from glm_exl3.ops.recoded_rows import rows

        return rows(x, matrix.codes, matrix.scale)
    if path == SCALED:
        return _scaled(x, matrix)
    return F.linear(x, matrix.codes.to(x.dtype)).mul_(matrix.scale)


def _streamed(x: torch.Tensor, matrix: RowCodes) -> torch.Tensor:
    y = torch.empty((x.shape[0], matrix.codes.shape[0]), dtype=x.dtype, device=x.device)
    floats = matrix.scheme == "fp8"
    ext.operators().byte_rows(x.contiguous(), matrix.codes, matrix.scale, floats, y)
    return y


def _scaled(x: torch.Tensor, matrix: RowCodes) -> torch.Tensor:
    from vllm import _custom_ops as ops

    codes, scale = ops.scaled_fp8_quant(x.contiguous(), scale=None, use_per_token_if_dynamic=True)
    weight_scale = matrix.scale[:, None]
    y: torch.Tensor = ops.cutlass_scaled_mm(
        codes, matrix.codes.t(), scale_a=scale, scale_b=weight_scale, out_dtype=x.dtype
    )
    return y


def _on_cpu(x: torch.Tensor, matrix: RowCodes) -> torch.Tensor:
    few = x.numel() <= tuning.ALIKE * x.shape[-1]
    if envs.RECODE_PATH.read() == SCALED and matrix.scheme == "fp8" and not few:
        return recode.linear_of_quantized_rows(x, matrix.codes, matrix.scale)
    return reference.dense_linear(x, matrix.codes, matrix.wide).mul_(matrix.scale)
