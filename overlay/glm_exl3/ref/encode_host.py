"""The encoder of `glm_exl3.ref.encode` for CPUs: the same bits, several times faster.

Why: one step updates 65536 costs; PyTorch walks over them once per operation, one compiled loop
walks over them once. Numba comes with vLLM and needs no compiler on the machine. Where it is absent
and for K = 7 and 8, whose loops would be too short, `encode_tiles` of the reference answers.

The table is laid out [new, q, mid] for states (q, mid, new) of K, 16 - 2K and K bits: then the cost
of a predecessor, the running minimum and the best costs are all contiguous in mid. What must stay
true: the arithmetic contract of the reference; the compiler must not fuse multiply and add, so the
loops are never compiled with `fastmath`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from glm_exl3.format.layout import TILE_ELEMENTS, Codebook
from glm_exl3.ref.codebook import STATES, codebook_table
from glm_exl3.ref.encode import ROTATION, check_encodable, encode_tiles

HOST_BITS = range(1, 7)


def encode_tiles_on_host(tiles: torch.Tensor, bits: int, codebook: Codebook) -> torch.Tensor:
    """`encode_tiles` on `torch.get_num_threads()` threads for CPU tensors with K = 1..6.

    Other tensors and rates go to the reference. Shapes, dtypes and errors are those of
    `encode_tiles`.
    """
    if tiles.is_cuda or bits not in HOST_BITS or find_spec("numba") is None:
        return encode_tiles(tiles, bits, codebook)
    check_encodable(tiles, bits)
    flat = tiles.reshape(-1, TILE_ELEMENTS).to(torch.float32).contiguous().numpy()
    states = np.empty(flat.shape, np.int32)
    table = codebook_table(codebook).to(torch.float32).numpy()
    branches, width = 1 << bits, STATES >> (2 * bits)
    ordered = np.ascontiguousarray(table.reshape(branches, width, branches).transpose(2, 0, 1))
    bounds = np.linspace(0, len(flat), torch.get_num_threads() + 1).astype(int)

    def encode_part(start: int, stop: int) -> None:
        _compiled()(flat[start:stop], table, ordered, states[start:stop])

    _compiled()
    with ThreadPoolExecutor(len(bounds) - 1) as pool:
        list(pool.map(encode_part, bounds[:-1], bounds[1:]))
    return torch.from_numpy(states).reshape(tiles.shape)


@cache
def _compiled() -> Callable[..., None]:
    """encode(tiles f32 [T, 256], table f32 [65536], ordered f32 [2^K, 2^K, 2^(16-2K)], states)."""
    jit: Any = import_module("numba").njit(nogil=True)
    forward, trace = jit(_forward), jit(_trace)

    def encode(tiles: Any, table: Any, ordered: Any, states: Any) -> None:
        branches, _, width = ordered.shape
        heads = branches * width
        best = np.empty((TILE_ELEMENTS + 1, heads), np.float32)
        path = np.empty(TILE_ELEMENTS, np.int32)
        for index in range(tiles.shape[0]):
            rotated = np.roll(tiles[index], -ROTATION)
            best[0, :] = 0
            forward(rotated, ordered, best)
            last, least = 0, np.float32(np.inf)
            for state in range(STATES):
                error = table[state] - rotated[-1]
                cost = error * error + best[TILE_ELEMENTS - 1, state // branches]
                if cost < least:
                    last, least = state, cost
            trace(rotated, table, best, branches, last, path)
            closing = path[ROTATION - 1]
            best[0, :] = np.inf
            best[0, closing % heads] = 0
            forward(tiles[index], ordered, best)
            trace(tiles[index], table, best, branches, closing, states[index])

    compiled: Callable[..., None] = jit(encode)
    return compiled


def _forward(tile: Any, ordered: Any, best: Any) -> None:
    """Fill best[1:] from best[0]."""
    branches, _, width = ordered.shape
    least = np.empty(width, np.float32)
    for step in range(TILE_ELEMENTS):
        value = tile[step]
        before = best[step].reshape(branches, width)
        after = best[step + 1].reshape(width, branches)
        for new in range(branches):
            least[:] = np.inf
            for q in range(branches):
                weights, costs = ordered[new, q], before[q]
                for mid in range(width):
                    error = weights[mid] - value
                    cost = error * error + costs[mid]
                    least[mid] = cost if cost < least[mid] else least[mid]
            after[:, new] = least


def _trace(tile: Any, table: Any, best: Any, branches: int, last: int, states: Any) -> None:
    """Fill `states` with the cheapest path that ends in `last`."""
    heads = STATES // branches
    state = last
    states[TILE_ELEMENTS - 1] = last
    for step in range(TILE_ELEMENTS - 1, 0, -1):
        head = state // branches
        state, least = head, np.float32(np.inf)
        for q in range(branches):
            predecessor = head + q * heads
            error = table[predecessor] - tile[step - 1]
            cost = error * error + best[step - 1, predecessor // branches]
            if cost < least:
                state, least = predecessor, cost
        states[step - 1] = state
