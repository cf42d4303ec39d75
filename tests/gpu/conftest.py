"""What every GPU test shares: fresh random weights, the reference in float64, poisoned memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # gpu_cases

HAS_GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not HAS_GPU:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def backend():
    from glm_exl3.ops import cuda_backend

    return cuda_backend


@pytest.fixture
def generator():
    """A new seed every time; a failure prints it."""
    made = torch.Generator("cuda")
    print("seed", made.seed())
    return made


@pytest.fixture(autouse=True)
def products_of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every kernel can; `test_integers` asks for the other ones."""
    from glm_exl3 import envs

    monkeypatch.setenv(envs.INTEGER_PRODUCTS.name, "0")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and workspaces hold NaN (and -1) before a kernel sees them, inside graphs, too."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)

        def filled(*arguments, real=real, **named):
            made = real(*arguments, **named)
            if made.is_cuda and made.numel() and made.is_contiguous():
                made.view(-1).view(torch.uint8).fill_(0xFF)
            return made

        monkeypatch.setattr(torch, name, filled)
