"""The CUDA back end: `torch.ops.glm_exl3_cuda.*` behind the interface of the back-end table.

The table of `glm_exl3.ops.tuning` decides by shape: few tokens go to the streaming kernels, which
decode weights in registers; many tokens of routed experts are sorted into tiles; many of a dense
matrix go through one decoded copy and the vendor's matrix product. Rates and codebooks without a
fast instance take that last way at any size.

Counters that the kernels leave at zero are kept per matrix and stream; scratch memory comes from
torch's allocator at every call, so graph capture keeps it inside the graph's pool. Two graphs that
hold the same matrix must not replay at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from glm_exl3.format.layout import TILE, Codebook
from glm_exl3.ops import ext, tuning
from glm_exl3.ops.cuda_encode import encode_tiles as encode
from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix
from glm_exl3.ops.tuning import Problem, Step

__all__ = [
    "dequant",
    "encode",
    "had128",
    "linear",
    "moe",
    "parts",
    "prepare_linear",
    "prepare_moe",
    "side_by_side",
]

_CODES = {Codebook.INST3: 0, Codebook.MCG: 1, Codebook.MUL1: 2}
_FAST_RATES = frozenset({2, 3, 4, 5, 6})
_FAST_CODEBOOKS = frozenset({Codebook.MCG, Codebook.MUL1})
STREAMED_TOKENS = 64  # what counters are made for; more go in parts
STREAMED_MOE_TOKENS = 128
MAX_TOP_K = 16
TILED_TOKENS = 8192  # 16,384 at once took 2.6 times as long on an H200
_GRAPHS = -1
_counters: dict[tuple[int, int], torch.Tensor] = {}
_outgrown: list[torch.Tensor] = []
_ops = ext.operators


def has_fast_kernel(trellis: torch.Tensor, codebook: Codebook) -> bool:
    """Whether the streaming kernels have an instance for this rate and codebook."""
    rate, rest = divmod(int(trellis.shape[-1]), 16)
    return rest == 0 and rate in _FAST_RATES and codebook in _FAST_CODEBOOKS


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _step(op: str, w: Exl3Stack | PackedMatrix, tokens: int) -> Step:
    """The table's step for a matrix, or for the experts whose gate and up are `w`."""
    shape = w.trellis.shape
    k, n, bits = shape[-3] * TILE, shape[-2] * TILE, shape[-1] // 16
    problem = Problem(op, k, n, bits, w.codebook.value)
    return tuning.step(problem, _capability(w.trellis.device), tokens)


def _zeroed_counters(trellis: torch.Tensor, count: int) -> torch.Tensor:
    """Counters of one matrix: one set per eager stream and one for captured graphs.

    The set for graphs is made by eager calls, where zeros are really written; a capture that finds
    none lets the graph zero its own at every replay.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    stream = _GRAPHS if capturing else torch.cuda.current_stream(trellis.device).cuda_stream
    held = _counters.get((trellis.data_ptr(), stream))
    if held is not None and held.numel() >= count:
        return held
    if capturing:
        return torch.zeros(count, dtype=torch.int32, device=trellis.device)
    for owner in (_GRAPHS, stream):
        key = (trellis.data_ptr(), owner)
        held = _counters.get(key)
        if held is None or held.numel() < count:
            if held is not None:
                _outgrown.append(held)  # a graph may still point to it
            _counters[key] = torch.zeros(count, dtype=torch.int32, device=trellis.device)
    return _counters[trellis.data_ptr(), stream]


def _scratch(device: torch.device, size_bytes: int) -> torch.Tensor:
    return torch.empty(max(size_bytes, 16), dtype=torch.uint8, device=device)


def dequant(matrix: PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """W [k, n] in `dtype` (fp32, fp16 or bf16), decoded and rotated in fp32."""
    out = torch.empty(
        matrix.in_features, matrix.out_features, dtype=dtype, device=matrix.trellis.device
    )
    _ops().dequant(matrix.trellis, matrix.suh, matrix.svh, _CODES[matrix.codebook], out)
    return out


def had128(
    x: torch.Tensor, pre: torch.Tensor | None = None, post: torch.Tensor | None = None
) -> torch.Tensor:
    """had128(x * pre) * post over the last dimension, fp32 inside, x.dtype out; scales fp16."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _ops().had128(x.contiguous(), pre, post, out)
    return out


def _linear_counters(matrix: PackedMatrix) -> torch.Tensor:
    count = _ops().linear_decode_counters(STREAMED_TOKENS, matrix.out_features)
    return _zeroed_counters(matrix.trellis, count)


def _moe_counters(w13: Exl3Stack, w2: Exl3Stack) -> torch.Tensor:
    hidden, intermediate = w2.trellis.shape[2] * TILE, w2.trellis.shape[1] * TILE
    sizes = (STREAMED_MOE_TOKENS, MAX_TOP_K, hidden, intermediate)
    return _zeroed_counters(w13.trellis, _ops().moe_decode_counters(*sizes))


def prepare_linear(matrix: PackedMatrix) -> PackedMatrix:
    """The same matrix; its counters exist from here on, so that a capture may come first."""
    if has_fast_kernel(matrix.trellis, matrix.codebook):
        _linear_counters(matrix)
    return matrix


def streamed(matrix: PackedMatrix, tokens: int, how: Step | None = None) -> Step | None:
    """The streaming kernel's step for so many tokens, or None where a decoded copy is multiplied;
    `how` overrules the table."""
    if not has_fast_kernel(matrix.trellis, matrix.codebook):
        return None
    how = how or _step("linear", matrix, tokens)
    return None if how.path == tuning.DECODED or tokens > STREAMED_TOKENS else how


def linear(x: torch.Tensor, matrix: PackedMatrix, how: Step | None = None) -> torch.Tensor:
    """x [..., k] -> [..., n] in x.dtype (fp16, bf16 or fp32); `how` overrules the table."""
    rows = x.reshape(-1, x.shape[-1])
    tokens, features = rows.shape[0], matrix.out_features
    if tokens == 0:
        return x.new_empty((*x.shape[:-1], features))
    step = streamed(matrix, tokens, how)
    if step is None:
        return torch.matmul(x, dequant(matrix, x.dtype))
    ops = _ops()
    out = torch.empty(tokens, features, dtype=x.dtype, device=x.device)
    ops.linear_decode(
        rows.contiguous(),
        matrix.trellis,
        matrix.suh,
        matrix.svh,
        _CODES[matrix.codebook],
        None,
        step.split_k,
        _linear_counters(matrix),
        _scratch(x.device, ops.linear_decode_workspace(tokens, rows.shape[1], features)),
        out,
    )
    return out.reshape(*x.shape[:-1], features)


def parts(
    x: torch.Tensor, matrices: Sequence[PackedMatrix | torch.Tensor], limit: float | None = None
) -> torch.Tensor:
    """x [..., k] -> [..., sum of n], for few tokens in one launch; see `cuda_parts.parts`."""
    from glm_exl3.ops import cuda_parts

    return cuda_parts.parts(x, matrices, limit)


def side_by_side(
    x: torch.Tensor, matrices: Sequence[PackedMatrix | torch.Tensor], own_rows: bool = False
) -> torch.Tensor:
    """x [..., k] -> [..., sum of n], one matrix after the other; see `cuda_parts.side_by_side`."""
    from glm_exl3.ops import cuda_parts

    return cuda_parts.side_by_side(x, matrices, own_rows)


def prepare_moe(w13: Exl3Stack, w2: Exl3Stack) -> tuple[Exl3Stack, Exl3Stack]:
    """Gate and up that share their input scales keep one copy: suh [E, 1, k], one rotation.

    Counters exist from here on, so that a capture may come first.
    """
    if has_fast_kernel(w13.trellis, w13.codebook):
        _moe_counters(w13, w2)
    if w13.suh.shape[1] == 2 and torch.equal(w13.suh[:, 0], w13.suh[:, 1]):
        w13 = Exl3Stack(w13.trellis, w13.suh[:, :1].contiguous(), w13.svh, w13.codebook)
    return w13, w2


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: Exl3Stack,
    w2: Exl3Stack,
    limit: float | None,
    expert_map: torch.Tensor | None = None,
    how: Step | None = None,
) -> torch.Tensor:
    """Routed sum [T, H] of this rank in x.dtype: weight * down(swiglu(gate(x), up(x))).

    x [T, H], topk_ids int32 or int64 [T, k] (global ids), topk_weights [T, k]; `expert_map` int32
    gives the local expert or -1. `how` overrules the table.
    """
    fast = has_fast_kernel(w13.trellis, w13.codebook) and has_fast_kernel(w2.trellis, w2.codebook)
    if not fast or topk_ids.shape[1] > MAX_TOP_K:
        return _moe_by_expert(x, topk_ids, topk_weights, w13, w2, limit, expert_map)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.shape[0] == 0:
        return out
    call = _RoutedCall(
        x.contiguous(),
        topk_ids.contiguous(),
        topk_weights.to(torch.float32).contiguous(),
        None if expert_map is None else expert_map.to(torch.int32),
        w13,
        w2,
        math.inf if limit is None else limit,
    )
    how = how or _step("moe", w13, x.shape[0])
    if how.path == tuning.TILED:
        call.run_tiled(out, tuning.PRODUCTS[how.product])
    else:
        call.run_streamed(out, how.split_k)
    return out


@dataclass(frozen=True)
class _RoutedCall:
    """Contiguous inputs of one call of the routed experts, and the two ways to run it."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    expert_map: torch.Tensor | None
    w13: Exl3Stack
    w2: Exl3Stack
    limit: float

    def _stacks(self) -> tuple[object, ...]:
        return (
            self.expert_map,
            self.w13.trellis,
            self.w13.suh,
            self.w13.svh,
            _CODES[self.w13.codebook],
            self.w2.trellis,
            self.w2.suh,
            self.w2.svh,
            _CODES[self.w2.codebook],
            self.limit,
        )

    def _sizes(self, tokens: int) -> tuple[int, int, int, int]:
        return tokens, self.ids.shape[1], self.x.shape[1], self.w2.trellis.shape[1] * TILE

    def run_tiled(self, out: torch.Tensor, product: int) -> None:
        ops, device = _ops(), self.x.device
        for start in range(0, self.x.shape[0], TILED_TOKENS):
            part = slice(start, min(start + TILED_TOKENS, self.x.shape[0]))
            sizes = self._sizes(part.stop - part.start)
            experts, inputs = self.w13.trellis.shape[0], self.w13.suh.shape[1]
            size_bytes = ops.moe_prefill_workspace(*sizes, experts, inputs)
            ops.moe_prefill(
                self.x[part],
                self.ids[part],
                self.weights[part],
                *self._stacks(),
                product,
                _scratch(device, size_bytes),
                out[part],
            )

    def run_streamed(self, out: torch.Tensor, split_k: int) -> None:
        ops, device = _ops(), self.x.device
        for start in range(0, self.x.shape[0], STREAMED_MOE_TOKENS):
            part = slice(start, min(start + STREAMED_MOE_TOKENS, self.x.shape[0]))
            sizes = self._sizes(part.stop - part.start)
            ops.moe_decode(
                self.x[part],
                self.ids[part],
                self.weights[part],
                *self._stacks(),
                split_k,
                _moe_counters(self.w13, self.w2),
                _scratch(device, ops.moe_decode_workspace(*sizes, split_k)),
                out[part],
            )


def _moe_by_expert(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: Exl3Stack,
    w2: Exl3Stack,
    limit: float | None,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """Any rate and codebook, one expert after the other in fp32; the host reads the expert list."""
    from glm_exl3.ref.moe import swiglu_clamped

    local = topk_ids.to(torch.int64)
    if expert_map is not None:
        local = expert_map.to(torch.int64)[local]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(local).tolist():
        if expert < 0:
            continue
        tokens, slots = torch.where(local == expert)
        halves = []
        for i in (0, 1):
            scales = w13.suh[expert, min(i, w13.suh.shape[1] - 1)]
            matrix = PackedMatrix(w13.trellis[expert, i], scales, w13.svh[expert, i], w13.codebook)
            halves.append(linear(x[tokens].to(torch.float32), matrix))
        hidden = swiglu_clamped(halves[0], halves[1], limit)
        down = PackedMatrix(w2.trellis[expert], w2.suh[expert], w2.svh[expert], w2.codebook)
        routed = linear(hidden, down)
        out.index_add_(0, tokens, routed * topk_weights[tokens, slots, None])
    return out.to(x.dtype)
