"""The peer's `quantize_exl3` with the signature of our `quantize_group`.

Its package is not imported as a whole, which would build 194 sources: its quantiser module is
loaded from the unpacked wheel below a bare package, its encoder comes from `nano.peer.build`, and
what only shows progress or manages many GPUs is a stand-in. The converter's defaults hold: damping
0.025, output scales always, one factorisation a Hessian, refitted scales.
"""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ref.quantize import Exl3Tensors

CALIBRATION_TOKENS = 1 << 18


class Progress:
    """Its progress bar, silent."""

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None: ...
    def update(self, *_: Any) -> None: ...
    def new_task(self, *_: Any) -> None: ...


def module(name: str, folder: Path | None = None, **members: Any) -> ModuleType:
    """Register a module of that name; with a folder it is a package whose parts lie there."""
    made = ModuleType(name)
    vars(made).update(members)
    if folder is not None:
        made.__path__ = [str(folder)]
    sys.modules[name] = made
    return made


def encoder(library: Path) -> ModuleType:
    """What its Python calls of its compiled extension."""
    torch.ops.load_library(str(library))
    ops = torch.ops.exl3_encoder

    def scratch(device: int, bits: int, mcg: bool, mul1: bool, length: int) -> tuple[bool, int]:
        optimised, wave = ops.scratch(device, bits, mcg, mul1, length)
        return bool(optimised), int(wave)

    made = ModuleType("exllamav3_ext")
    vars(made).update(
        quantize_tiles=ops.encode, quantize_tiles_scratch=scratch, pack_trellis=ops.pack
    )
    return made


def nothing(*_: Any, **__: Any) -> None:
    """Stands in for its memory management and synchronisation of many GPUs."""


def load(wheel: Path, library: Path, folder: Path) -> Callable[..., Any]:
    """Its `quantize_exl3`, from the wheel unpacked below `folder`."""
    zipfile.ZipFile(wheel).extractall(folder)
    root = folder / "exllamav3"
    module("exllamav3", root)
    module("exllamav3.ext", exllamav3_ext=encoder(library))
    module("exllamav3.util", root / "util", cuda_sync_active=torch.cuda.synchronize)
    module("exllamav3.util.progress", ProgressBar=Progress)
    module("exllamav3.util.memory", free_mem=nothing, list_gpu_tensors=nothing)
    module("exllamav3.util.tensor", save_tensor_image=nothing)
    module("exllamav3.modules", root / "modules")
    module("exllamav3.modules.quant", root / "modules" / "quant")
    found = importlib.import_module("exllamav3.modules.quant.exl3_lib.quantize")
    return found.quantize_exl3


class PeerQuantiser:
    """Quantises like the peer; `options` are further arguments of its converter."""

    def __init__(self, quantise: Callable[..., Any], **options: Any) -> None:
        self.quantise, self.options = quantise, options

    def __call__(
        self,
        weights: Sequence[torch.Tensor],
        bits: int,
        codebook: Codebook,
        *,
        hessian: torch.Tensor | None = None,
        seed: int = 0,
        **_: Any,
    ) -> list[Exl3Tensors]:
        """Each matrix [k, n] on its own: the peer's converter shares no scales."""
        return [self.one(weight, bits, codebook, hessian, seed) for weight in weights]

    def one(
        self,
        weight: torch.Tensor,
        bits: int,
        codebook: Codebook,
        hessian: torch.Tensor | None,
        seed: int,
    ) -> Exl3Tensors:
        """One matrix, with the Hessian X^T X of its inputs."""
        if hessian is None:
            raise ValueError("the peer is compared with a Hessian only")
        inputs = {
            "H": hessian.float().clone(),
            "count": CALIBRATION_TOKENS,
            "finalized": False,
            "first_key": "miniature",
            "device": hessian.device,
        }
        asked = {
            "seed": seed,
            "K": bits,
            "devices": [0],
            "device_ratios": None,
            "apply_out_scales": None,
            codebook.value: True,
            **self.options,
        }
        _, _, made = self.quantise(weight.float().clone(), inputs, asked, True)
        return Exl3Tensors(made["trellis"], made["suh"], made["svh"], codebook)
