"""Muon for matrices, Adam for the rest, with learning rates set from outside each step.

Muon (Jordan et al., 2024): momentum, then the nearest semi-orthogonal matrix by five Newton-Schulz
iterations in bf16. Parameters of equal shape are stacked, so that a step is a handful of batched
products; stacked experts take part as they are.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: Tensor, rounds: int = 5) -> Tensor:
    """Approximate orthogonal factor of each matrix of `[N, A, B]`, bf16."""
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(rounds):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Muon:
    """Momentum with orthogonalised updates for parameters of two or three dims."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self.groups[tuple(parameter.shape)].append(parameter)
        self.memory = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float, decay: float) -> None:
        """One update at learning rate `rate` with weight decay `decay`."""
        for shape, group in self.groups.items():
            present = [p for p in group if p.grad is not None]
            if len(present) != len(group):
                continue
            gradient = torch.stack([p.grad for p in group])
            memory = self.memory[shape]
            memory.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(memory, self.momentum).flatten(0, -3))
            gain = max(1.0, shape[-2] / shape[-1]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * decay)
            torch._foreach_add_(
                group, list(update.view_as(memory).float().unbind(0)), alpha=-rate * gain
            )


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices for Muon, everything else for Adam) of a module."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    adam_only = (
        "embed",
        "lm_head",
        "hc.",
        "gate.weight",
        "conv1d",
        "indexer",
        "selector",
        "base_kernel",
        "kernel_projection",
    )
    for name, parameter in module.named_parameters():
        special = any(part in name for part in adam_only)
        (rest if special or parameter.ndim < 2 else matrices).append(parameter)
    return matrices, rest


class Optimiser:
    """Muon and Adam over one or more modules, stepped with one factor on `rates` (Muon, Adam)."""

    def __init__(self, modules: list[nn.Module], rates: tuple[float, float]) -> None:
        split = [split_parameters(module) for module in modules]
        self.rates = rates
        self.muon = Muon([p for matrices, _ in split for p in matrices])
        rest = [p for _, others in split for p in others]
        self.adam = torch.optim.Adam(rest, betas=(0.9, 0.98), eps=1e-10, fused=rest[0].is_cuda)
        self.modules = modules

    def step(self, factor: float) -> None:
        """Apply the gradients and clear them."""
        self.muon.step(self.rates[0] * factor, decay=0.02)
        for group in self.adam.param_groups:
            group["lr"] = self.rates[1] * factor
        self.adam.step()
        for module in self.modules:
            module.zero_grad(set_to_none=True)
