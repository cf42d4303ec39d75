"""Hessians X^T X of every packed matrix's input, from calibration text.

The inputs are those of the BF16 model on training rows, attention following the indexer's choice.
Modules that read the same input have equal Hessians; they are collected per module all the same,
which costs little here. Each expert sees only the tokens routed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nano import layers
from nano.export import PREFIX
from nano.layers import Experts, Selection
from nano.model import Nano, Predictor

Hessians = dict[str, Tensor]


def added(hessians: Hessians, module: str, inputs: Tensor) -> None:
    """Add the outer products of `inputs` `[..., k]` to a module's Hessian."""
    with torch.autocast(inputs.device.type, enabled=False):
        flat = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        product = flat.T @ flat
    hessians[module] = hessians[module] + product if module in hessians else product


def linear_hook(hessians: Hessians, module: str) -> Callable[..., None]:
    """A forward hook that records the input of a linear map."""

    def record(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
        added(hessians, module, inputs[0])

    return record


def experts_hook(hessians: Hessians, stem: str) -> Callable[..., None]:
    """A forward hook that records, per expert, the inputs of its routed tokens."""

    def record(block: Experts, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        tokens, weights = inputs
        for index in range(weights.shape[1]):
            rows = tokens[weights[:, index] > 0]
            gate, up = F.linear(rows, block.gate_up_proj[index].to(rows.dtype)).chunk(2, dim=-1)
            inner = layers.clamped_swiglu(gate, up, block.limit)
            added(hessians, f"{stem}.{index}.gate_proj", rows)
            added(hessians, f"{stem}.{index}.up_proj", rows)
            added(hessians, f"{stem}.{index}.down_proj", inner)

    return record


@contextmanager
def recording(hessians: Hessians, module: nn.Module, stem: str) -> Iterator[None]:
    """Record the inputs of all linear maps and experts of a module while the context lasts."""
    handles = []
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            handles.append(part.register_forward_hook(linear_hook(hessians, stem + name)))
        elif isinstance(part, Experts):
            handles.append(part.register_forward_hook(experts_hook(hessians, stem + name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def collect(target: Nano, predictor: Predictor, batches: list[Tensor]) -> Hessians:
    """Hessians by checkpoint module name, from token batches `[B, T]`."""
    hessians: Hessians = {}
    selection = Selection(sparse=True)
    last = f"{PREFIX}layers.{len(target.layers)}."
    device = batches[0].device.type
    with recording(hessians, target, PREFIX), recording(hessians, predictor, last):
        for tokens in batches:
            with torch.autocast(device, torch.bfloat16):
                hidden = target(tokens, selection).hidden
                added(hessians, "lm_head", hidden)
                following = F.pad(tokens[:, 1:], (0, 1))
                embedded = target.embed_tokens(following).to(hidden.dtype)
                predictor(embedded, hidden, selection)
    return hessians
