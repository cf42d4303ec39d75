"""The peer's paths as callables on our packed weights, each the way its own package calls it.

Routing work that its package does with torch on the host (sorting, counting, grouping) happens
before the clock starts, which favours the peer: ours sorts on the device inside the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix
from kernels.inputs import Routed

Call = Callable[[], torch.Tensor]
FEW_TOKENS = 8  # what its two-launch decode path takes
GEMM_ROWS = 144  # above, its linear layer decodes the matrix first
FOLDED_ROWS = 1024  # from here its decoded matrix has the rotations folded in
SLICE = 32768  # widest matrix it decodes at once
GROUP_BYTES = 256 << 20  # decoded experts alive at a time
GROUP = 16


def load(library: Path) -> None:
    torch.ops.load_library(str(library))


def _ops() -> Any:
    return torch.ops.exl3_peer


def _flags(codebook: Codebook) -> tuple[bool, bool]:
    return codebook is Codebook.MCG, codebook is Codebook.MUL1


def linear(x: torch.Tensor, matrix: PackedMatrix) -> Call:
    """fp16 x [T, k] -> fp16 [T, n] by the path its linear layer takes for T rows."""
    x = x.to(torch.float16)
    if x.shape[0] <= GEMM_ROWS:
        return partial(_gemm, x, matrix)
    return partial(_decode_and_multiply, x, matrix)


def _gemm(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    out = torch.empty(x.shape[0], matrix.out_features, dtype=torch.float16, device=x.device)
    _ops().gemm(
        x,
        matrix.trellis,
        out,
        matrix.suh,
        torch.empty_like(x),
        matrix.svh,
        *_flags(matrix.codebook),
    )
    return out


def _decode_and_multiply(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    ops, flags, bits = _ops(), _flags(matrix.codebook), matrix.trellis.shape[2] / 16
    n = matrix.out_features
    if n > SLICE:
        raise ValueError(f"{n} columns: the table multiplies at most {SLICE} decoded columns")
    out = torch.empty(x.shape[0], n, dtype=torch.float16, device=x.device)
    weight = torch.empty(x.shape[1], n, dtype=torch.float16, device=x.device)
    if x.shape[0] >= FOLDED_ROWS:
        ops.decode_rotated(weight, matrix.trellis, matrix.suh, matrix.svh, bits, *flags, 0)
        ops.product(x, weight, out)
        return out
    rotated = torch.empty_like(x)
    ops.rotate(x, rotated, matrix.suh, None)
    ops.decode(weight, matrix.trellis, bits, *flags)
    ops.product(rotated, weight, out)
    ops.rotate(out, out, None, matrix.svh)
    return out


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [E]: where each expert's part of [E, ...] starts."""
    step = tensor.stride(0) * tensor.element_size()
    count = torch.arange(tensor.shape[0], dtype=torch.int64, device=tensor.device)
    return tensor.data_ptr() + step * count


@dataclass(frozen=True)
class Experts:
    """Our stacks as the peer sees them: address tables of gate, up and down."""

    tables: list[torch.Tensor]
    w13: Exl3Stack
    w2: Exl3Stack
    bits: float
    hidden: int
    intermediate: int
    limit: float

    @classmethod
    def of(cls, w13: Exl3Stack, w2: Exl3Stack, limit: float) -> Experts:
        """`w13` as it comes from the checkpoint, with input scales for gate and for up."""
        tables = []
        for part in (0, 1):
            for tensor in (w13.trellis, w13.suh, w13.svh):
                tables.append(_addresses(tensor[:, part]))
        tables += [_addresses(tensor) for tensor in (w2.trellis, w2.suh, w2.svh)]
        bits = w2.trellis.shape[-1] / 16
        intermediate, hidden = w2.suh.shape[-1], w2.svh.shape[-1]
        return cls(tables, w13, w2, bits, hidden, intermediate, limit)


def moe_few(call: Routed, experts: Experts) -> Call:
    """Its path for up to eight tokens: fp32 [T, H]."""
    tokens, slots = call.ids.shape[0], call.ids.numel()
    device, h, i = call.x.device, experts.hidden, experts.intermediate

    def half(width: int) -> torch.Tensor:
        return torch.empty(slots, width, dtype=torch.float16, device=device)

    length = slots * (i // 128) + tokens * (h // 128) + 2 * slots + 3
    scratch = [half(h), half(h), half(i), half(i), half(i)]
    scratch.append(torch.empty(slots, h, dtype=torch.float32, device=device))
    scratch.append(torch.zeros(length, dtype=torch.int32, device=device))
    out = torch.empty(tokens, h, dtype=torch.float32, device=device)
    inputs = call.x.half(), call.ids.long(), call.weights.half()

    def run() -> torch.Tensor:
        _ops().moe_few(
            *inputs,
            experts.tables,
            experts.bits,
            *_flags(experts.w2.codebook),
            experts.limit,
            scratch,
            out,
        )
        return out

    return run


@dataclass(frozen=True)
class Sorted:
    """Pairs in the order of their experts."""

    counts: list[int]
    count: torch.Tensor  # int64 [E + 1]
    tokens: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, call: Routed, experts: int) -> Sorted:
        flat = call.ids.long().flatten()
        order = flat.argsort()
        count = torch.bincount(flat, minlength=experts + 1)
        weights = call.weights.half().flatten()[order]
        return cls(count.tolist(), count, order // call.ids.shape[1], weights)


def moe_rows(call: Routed, experts: Experts) -> Call:
    """Its fused kernel over sorted rows: fp32 [T, H]; mul1 takes wide tiles for fuller experts."""
    routed = Sorted.of(call, experts.w2.trellis.shape[0])
    x, device, h, i = call.x.half(), call.x.device, experts.hidden, experts.intermediate
    groups = _ops().moe_rows_concurrency(device.index or 0)
    rows = max(64, *routed.counts)
    scratch = [
        torch.empty(groups, rows, width, dtype=torch.float16, device=device)
        for width in (h, h, i, i)
    ]
    tiles = [(16, 1, rows)]
    if experts.w2.codebook is Codebook.MUL1 and rows > 16:
        tiles = [(64, 33, rows), (32, 17, 32), (16, 1, 16)]

    def run() -> torch.Tensor:
        out = torch.zeros(x.shape[0], h, dtype=torch.float32, device=device)
        for tile, low, high in tiles:
            active = sum(low <= count <= high for count in routed.counts)
            if active:
                _ops().moe_rows(
                    x,
                    out,
                    routed.count,
                    routed.tokens,
                    routed.weights,
                    scratch,
                    experts.bits,
                    experts.tables,
                    *_flags(experts.w2.codebook),
                    experts.limit,
                    active,
                    low,
                    high,
                    tile,
                )
        return out

    return run


def moe_decoded(call: Routed, experts: Experts) -> Call:
    """Its tier for full experts: groups are decoded to fp16 and multiplied by cuBLAS; fp32 out."""
    routed = Sorted.of(call, experts.w2.trellis.shape[0])
    device = call.x.device
    x = torch.cat([call.x.half(), torch.zeros_like(call.x[:1], dtype=torch.float16)])
    tokens = torch.cat([routed.tokens, routed.tokens.new_full((1,), call.x.shape[0])])
    weights = torch.cat([routed.weights, routed.weights.new_zeros(1)]).float()[:, None]
    firsts = [0]
    for count in routed.counts:
        firsts.append(firsts[-1] + count)
    met = [e for e, count in enumerate(routed.counts) if count]
    order = sorted(met, key=lambda e: -routed.counts[e])
    size_bytes = 4 * experts.hidden * experts.intermediate
    width = max(1, min(GROUP, GROUP_BYTES // size_bytes))
    groups = []
    for start in range(0, len(order), width):
        ids = order[start : start + width]
        rows = routed.counts[ids[0]]
        index = torch.full((len(ids), rows), tokens.numel() - 1, device=device)
        for line, e in enumerate(ids):
            index[line, : routed.counts[e]] = torch.arange(firsts[e], firsts[e + 1], device=device)
        flat = index.flatten()
        chosen = torch.tensor(ids, device=device)
        tables = [table[chosen].contiguous() for table in experts.tables]
        groups.append((len(ids), tokens[flat], weights[flat], tables))

    def run() -> torch.Tensor:
        out = torch.zeros(x.shape[0], experts.hidden, dtype=torch.float32, device=device)
        for count, tokens_of, weights_of, tables in groups:
            routed_rows = _decoded_group(x[tokens_of].view(count, -1, x.shape[1]), experts, tables)
            out.index_add_(0, tokens_of, routed_rows.flatten(0, 1).mul_(weights_of))
        return out[:-1]

    return run


def _decoded_group(x: torch.Tensor, experts: Experts, tables: list[torch.Tensor]) -> torch.Tensor:
    """x [B, rows, H] of B experts -> fp32 [B, rows, H]."""
    ops, flags, bits = _ops(), _flags(experts.w2.codebook), experts.bits
    count, rows, h = x.shape
    i = experts.intermediate

    def product(rows_in: torch.Tensor, n: int, at: int, dtype: torch.dtype) -> torch.Tensor:
        k = rows_in.shape[2]
        weight = torch.empty(count, k, n, dtype=torch.float16, device=x.device)
        ops.decode_batch(weight, *tables[at : at + 3], bits, *flags)
        out = torch.empty(count, rows, n, dtype=dtype, device=x.device)
        ops.product_batch(rows_in, weight, out)
        return out

    gate = product(x, i, 0, torch.float16)
    up = product(x, i, 3, torch.float16)
    flat = up.view(-1, i)
    ops.activation(gate.view(-1, i), flat, flat, experts.limit)
    return product(up, h, 6, torch.float32)


def moe(call: Routed, experts: Experts) -> list[Call]:
    """Every path of the peer that fits the number of tokens; the table takes the fastest."""
    tokens = call.ids.shape[0]
    if tokens <= FEW_TOKENS:
        return [moe_few(call, experts)]
    paths = [moe_rows]
    if tokens >= 1024:
        paths.append(moe_decoded)
    return [path(call, experts) for path in paths]
