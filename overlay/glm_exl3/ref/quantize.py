"""Quantise a matrix to EXL3 with the encoder, with or without a Hessian.

W = diag(suh) H What H diag(svh): svh takes random signs and the root mean square of each output
channel, suh random signs and that of each input channel after the rotation along n, both so that
What looks like the codebook's own distribution; one scalar found by search finishes the scale. With
a Hessian X^T X of the inputs, rows are encoded from the last block of 16 to the first and the error
made so far is fed forward through the block LDL factor of the rotated Hessian (LDLQ, QuIP#, Tseng
et al., 2024). Afterwards svh and suh are refitted by least squares in the metric of the Hessian.

Matrices that read the same input may share one suh (`quantize_group`), as gate and up of the `tr3`
family do. Identical inputs and seed give identical bytes on one kind of machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from glm_exl3.format.layout import (
    HADAMARD,
    MCG_MARKER,
    MUL1_MARKER,
    TILE,
    TILE_ELEMENTS,
    Codebook,
)
from glm_exl3.ref.codebook import codebook_table
from glm_exl3.ref.decode import decode_rotated, pack_states, tile_positions
from glm_exl3.ref.encode_host import encode_tiles_on_host
from glm_exl3.ref.hadamard import had128

DAMPING = 0.025
REFIT_ROUNDS = 2
SEARCH_TILES, SEARCH_STEP, SEARCH_ROUNDS = 48, 1.06, 6
WIDE_FACTORS = (1.08, 0.97, 0.95, 0.91, 0.88, 0.84, 0.81, 0.79)
MUL1_FACTORS = (1.08, 0.97, 0.93, 0.93, 0.91, 0.89, 0.88, 0.88)
"""Where the search starts, for K = 1..8: the least error on normal values, as a factor on the
standard deviation of the codebook. The higher K, the more the ends of its range matter."""

Encoder = Callable[[torch.Tensor, int, Codebook], torch.Tensor]


@dataclass(frozen=True)
class Exl3Tensors:
    """One packed matrix: trellis int16 [k/16, n/16, 16K], suh fp16 [k], svh fp16 [n]."""

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: Codebook

    def state_dict(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint tensors under `prefix`, with the codebook's marker."""
        tensors = {
            f"{prefix}.trellis": self.trellis.contiguous(),
            f"{prefix}.suh": self.suh.contiguous(),
            f"{prefix}.svh": self.svh.contiguous(),
        }
        marker = {Codebook.MCG: MCG_MARKER, Codebook.MUL1: MUL1_MARKER}.get(self.codebook)
        if marker is not None:
            signed = marker - (1 << 32) if marker >= 1 << 31 else marker
            tensors[f"{prefix}.{self.codebook.value}"] = torch.tensor(signed, dtype=torch.int32)
        return tensors


def quantize(
    weight: torch.Tensor,
    bits: int,
    codebook: Codebook,
    *,
    hessian: torch.Tensor | None = None,
    seed: int = 0,
    encoder: Encoder = encode_tiles_on_host,
) -> Exl3Tensors:
    """Quantise `weight` [k, n] at integer K; see `quantize_group`."""
    return quantize_group([weight], bits, codebook, hessian=hessian, seed=seed, encoder=encoder)[0]


def quantize_group(
    weights: Sequence[torch.Tensor],
    bits: int,
    codebook: Codebook,
    *,
    hessian: torch.Tensor | None = None,
    seed: int = 0,
    encoder: Encoder = encode_tiles_on_host,
) -> list[Exl3Tensors]:
    """Quantise matrices [k, n_i] that read the same input so that they share one suh.

    `hessian` [k, k] is X^T X of the inputs (any positive scale). `encoder(tiles [T, 256], bits,
    codebook) -> states` may be replaced by a faster one that keeps the contract of
    `glm_exl3.ref.encode`. Raises ValueError for sizes that are no multiple of 128 and for values
    that are not finite.
    """
    joined = torch.cat([weight.to(torch.float32) for weight in weights], dim=1)
    if joined.shape[0] % HADAMARD or any(weight.shape[1] % HADAMARD for weight in weights):
        raise ValueError(f"dims must be multiples of {HADAMARD}: {[w.shape for w in weights]}")
    if not torch.isfinite(joined).all():
        raise ValueError("weights to quantise must be finite")
    metric = _metric(joined, hessian)
    packed = initial_scales(joined, codebook, seed)
    packed = _encode_matrix(joined, packed, bits, metric, encoder)
    for _ in range(REFIT_ROUNDS):
        packed = _refit(joined, packed, metric)
    return split_columns(packed, [weight.shape[1] for weight in weights])


def pad_to_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Zero-pad [k, n] to multiples of 128 on both sides."""
    k, n = (-size % HADAMARD for size in weight.shape)
    return torch.nn.functional.pad(weight, (0, n, 0, k))


def _metric(weight: torch.Tensor, hessian: torch.Tensor | None) -> torch.Tensor:
    """fp64 [k, k]: the Hessian, damped, of mean diagonal 1; the identity without one."""
    identity = torch.eye(weight.shape[0], dtype=torch.float64, device=weight.device)
    if hessian is None:
        return identity
    wide = hessian.to(torch.float64)
    level = wide.diagonal().mean()
    if not level > 0:
        raise ValueError("the Hessian has no positive diagonal: no calibration input was seen")
    return wide / level + DAMPING * identity


def initial_scales(weight: torch.Tensor, codebook: Codebook, seed: int) -> Exl3Tensors:
    """suh and svh before any search, with an empty trellis; fp32."""
    k, n = weight.shape
    generator = torch.Generator().manual_seed(seed)
    left = torch.randint(0, 2, (k,), generator=generator).to(weight) * 2 - 1
    right = torch.randint(0, 2, (n,), generator=generator).to(weight) * 2 - 1
    svh = right * weight.square().mean(0).sqrt().clamp_min(1e-10)
    rows = had128(weight / svh, dim=1).square().mean(1).sqrt().clamp_min(1e-10)
    std = codebook_table(codebook).to(torch.float32).std().item()
    empty = torch.empty(0, dtype=torch.int16, device=weight.device)
    return Exl3Tensors(empty, left * rows / std, svh, codebook)


def inner(weight: torch.Tensor, packed: Exl3Tensors) -> torch.Tensor:
    """What [k, n] that the scales ask for."""
    return had128(had128(weight / packed.suh[:, None] / packed.svh, dim=0), dim=1)


def to_tiles(rows: torch.Tensor) -> torch.Tensor:
    """[16, n] -> [n/16, 256] in element order."""
    grid = rows.reshape(TILE, -1, TILE).transpose(0, 1).reshape(-1, TILE_ELEMENTS)
    return grid[:, tile_positions().to(rows.device)]


def from_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """[n/16, 256] in element order -> [16, n]."""
    grid = torch.empty_like(tiles)
    grid[:, tile_positions().to(tiles.device)] = tiles
    return grid.reshape(-1, TILE, TILE).transpose(0, 1).reshape(TILE, -1)


def best_factor(target: torch.Tensor, bits: int, codebook: Codebook, encoder: Encoder) -> float:
    """Factor on What of least relative error over a sample of tiles.

    Steps of 6 % from the start value down to the least error, then a parabola through the last
    three.
    """
    blocks = target.shape[0] // TILE
    tiles = torch.cat([to_tiles(target[TILE * b : TILE * (b + 1)]) for b in range(blocks)])
    sample = tiles[:: max(1, tiles.shape[0] // SEARCH_TILES)][:SEARCH_TILES]
    table = codebook_table(codebook).to(torch.float32).to(target.device)
    errors: dict[int, float] = {}

    def factor(step: float) -> float:
        start = MUL1_FACTORS if codebook is Codebook.MUL1 else WIDE_FACTORS
        return start[bits - 1] * SEARCH_STEP**step

    def error(step: int) -> float:
        if step not in errors:
            decoded = table[encoder(sample * factor(step), bits, codebook).to(torch.int64)]
            errors[step] = float((decoded / factor(step) - sample).square().mean())
        return errors[step]

    best = 0
    for _ in range(SEARCH_ROUNDS):
        least = min((best, best - 1, best + 1), key=error)
        if least == best:
            break
        best = least
    before, here, after = (error(best + offset) for offset in (-1, 0, 1))
    curvature = before - 2 * here + after
    shift = 0.5 * (before - after) / curvature if curvature > 0 else 0.0
    return factor(best + max(-0.5, min(0.5, shift)))


def block_factor(metric: torch.Tensor) -> torch.Tensor:
    """L of metric = L D L^T, unit lower triangular in blocks of 16 (identity on the diagonal)."""
    lower = torch.linalg.cholesky(metric)
    size = metric.shape[0]
    factor = torch.empty_like(lower)
    for start in range(0, size, TILE):
        stop = start + TILE
        block = lower[start:stop, start:stop]
        solved = torch.linalg.solve_triangular(block, lower[:, start:stop], upper=False, left=False)
        factor[:, start:stop] = solved
    return factor


def _encode_matrix(
    weight: torch.Tensor,
    packed: Exl3Tensors,
    bits: int,
    metric: torch.Tensor,
    encoder: Encoder,
) -> Exl3Tensors:
    factor = best_factor(inner(weight, packed), bits, packed.codebook, encoder)
    packed = replace(packed, suh=packed.suh / factor)
    target = inner(weight, packed)
    table = codebook_table(packed.codebook).to(torch.float32).to(weight.device)
    blocks = weight.shape[0] // TILE
    trellis: list[torch.Tensor] = [packed.trellis] * blocks
    signed = packed.suh.to(torch.float64)
    rotated = had128(had128(metric * signed[:, None] * signed, dim=0), dim=1)
    feedback = block_factor(rotated / rotated.diagonal().mean()).to(torch.float32)
    errors = torch.zeros_like(target)
    for block in range(blocks - 1, -1, -1):
        rows = slice(TILE * block, TILE * (block + 1))
        behind = slice(TILE * (block + 1), None)
        wanted = target[rows] + feedback[behind, rows].t() @ errors[behind]
        states = encoder(to_tiles(wanted), bits, packed.codebook)
        errors[rows] = target[rows] - from_tiles(table[states.to(torch.int64)])
        trellis[block] = pack_states(states, TILE * bits)
    return replace(packed, trellis=torch.stack(trellis))


def _refit(weight: torch.Tensor, packed: Exl3Tensors, metric: torch.Tensor) -> Exl3Tensors:
    """Least-squares svh for this suh, then suh for that svh, in the metric of the Hessian."""
    values = decode_rotated(packed.trellis, packed.codebook).to(torch.float64)
    rotated = had128(had128(values, dim=0), dim=1)
    wanted = weight.to(torch.float64)
    base = rotated * packed.suh.to(torch.float64)[:, None]
    weighted = metric @ base
    svh = (weighted * wanted).sum(0) / (weighted * base).sum(0).clamp_min(1e-30)
    svh = svh.to(torch.float16).to(torch.float64)
    scaled = rotated * svh
    system = metric * (scaled @ scaled.t())
    right = (metric * (scaled @ wanted.t())).sum(1)
    suh = torch.linalg.solve(system, right)
    return replace(packed, suh=suh.to(torch.float16), svh=svh.to(torch.float16))


def split_columns(packed: Exl3Tensors, widths: Sequence[int]) -> list[Exl3Tensors]:
    """Matrices side by side along n, each of its width; all share suh."""
    parts, start = [], 0
    for width in widths:
        columns = slice(start // TILE, (start + width) // TILE)
        parts.append(
            replace(
                packed,
                trellis=packed.trellis[:, columns],
                svh=packed.svh[start : start + width],
            )
        )
        start += width
    return parts
