"""Which kernels run: the back-end table.

One row per back end, in order of preference. A row names the module that implements it, so choosing
never imports compiled code of rows that are not chosen. `GLM_EXL3_BACKEND=auto` takes the first row
whose probe finds nothing against it and says so in one log line; a named row that cannot run is an
error, never a silent fallback.

A back-end module provides

    linear(x, matrix) -> y                 x [..., k], y [..., n] in x.dtype
    parts(x, matrices, limit) -> y         products side by side, or gate and up as their activation
    moe(x, topk_ids, topk_weights, w13, w2, limit, expert_map) -> y [T, H] in x.dtype, rank-partial
    dequant(matrix, dtype) -> W [k, n]
    had128(x, pre, post) -> had128(x * pre) * post, last dimension, x.dtype
    encode(tiles, bits, codebook) -> int32 states [..., 256]

and, if the checkpoint layout is not the one its kernels read,

    prepare_linear(matrix) -> PackedMatrix
    prepare_moe(w13, w2) -> (w13, w2)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch

from glm_exl3 import envs
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.log import logger

_log = logger(__name__)


@dataclass(frozen=True)
class Shape:
    """What a workspace formula needs: tokens, in and out features, routed experts per token."""

    tokens: int
    in_features: int
    out_features: int
    top_k: int = 1


@dataclass(frozen=True)
class Device:
    """What a probe is asked about: the device type and, on CUDA, its capability (major, minor)."""

    kind: str
    capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, device: torch.device) -> Device:
        if device.type != "cuda":
            return cls(device.type)
        return cls("cuda", torch.cuda.get_device_capability(device))


@dataclass(frozen=True)
class BackendRow:
    """One back end. `probe` returns why it cannot run on a device, or None when it can.

    Capabilities are inclusive and only bind on CUDA; `workspace_bytes` gives the scratch memory of
    one call; `dense_on_load` rows multiply with a matrix that is decoded once when loading ends.
    """

    name: str
    module: str
    kinds: tuple[str, ...]
    probe: Callable[[Device], str | None]
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    graph_safe: bool = True
    workspace_bytes: Callable[[Shape], int] = lambda shape: 0
    dense_on_load: tuple[str, ...] = ()

    def refusal(self, device: Device) -> str | None:
        """Why this back end cannot run on `device`, or None."""
        if device.kind not in self.kinds:
            return f"runs on {' or '.join(self.kinds)}, not on {device.kind}"
        if device.capability is not None:
            low, high = self.min_capability, self.max_capability
            if (low and device.capability < low) or (high and device.capability > high):
                return f"needs compute capability {low} to {high}, found {device.capability}"
        return self.probe(device)

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


def _never_refuses(device: Device) -> str | None:
    return None


def _probe_cuda(device: Device) -> str | None:
    """The compiled extension answers for itself; where it is not built, that is the reason."""
    try:
        extension = importlib.import_module("glm_exl3.ops.ext")
    except ImportError as error:
        return f"the compiled kernels cannot be imported ({error})"
    reason: str | None = extension.refusal(device.capability)
    return reason


ROWS: tuple[BackendRow, ...] = (
    BackendRow(
        name="cuda",
        module="glm_exl3.ops.cuda_backend",
        kinds=("cuda",),
        probe=_probe_cuda,
        min_capability=(8, 0),
    ),
    BackendRow(
        name="reference",
        module="glm_exl3.ops.reference",
        kinds=("cpu", "cuda"),
        probe=_never_refuses,
        graph_safe=False,
        workspace_bytes=lambda shape: 8 * shape.in_features * shape.out_features,
        dense_on_load=("cpu",),
    ),
)


def row(name: str) -> BackendRow:
    """The row called `name`. Raises GlmExl3Error for a name that is not in the table."""
    for candidate in ROWS:
        if candidate.name == name:
            return candidate
    raise GlmExl3Error(
        code="backend",
        seen=f"{envs.BACKEND.name}={name!r}, but there is no such back end",
        why="a named back end is never replaced by another",
        fix=f"use auto or one of {', '.join(candidate.name for candidate in ROWS)}",
    )


def choose(device: Device, wanted: str | None = None) -> BackendRow:
    """The row to use on `device`; `wanted` defaults to the knob GLM_EXL3_BACKEND.

    Raises GlmExl3Error when a named back end cannot run or when none can.
    """
    return _choose(device, envs.BACKEND.read() if wanted is None else wanted)


@lru_cache(maxsize=32)
def _choose(device: Device, wanted: str) -> BackendRow:
    if wanted != "auto":
        chosen = row(wanted)
        refusal = chosen.refusal(device)
        if refusal is not None:
            raise GlmExl3Error(
                code="backend",
                seen=f"back end {wanted!r} {refusal}",
                why=f"{envs.BACKEND.name} names it, so no other may take its place",
                fix=f"unset {envs.BACKEND.name} to take the first back end that can run",
            )
        return chosen
    refusals: list[str] = []
    for candidate in ROWS:
        refusal = candidate.refusal(device)
        if refusal is None:
            _log.info(
                "back end %s on %s%s",
                candidate.name,
                device.kind,
                "; passed over " + "; ".join(refusals) if refusals else "",
            )
            return candidate
        refusals.append(f"{candidate.name}: {refusal}")
    raise GlmExl3Error(
        code="backend",
        seen=f"no back end can run on {device}: {'; '.join(refusals)}",
        why="packed matrices need kernels for the device they live on",
        fix="use a supported device or build the extension (docs/kernels.md)",
    )
