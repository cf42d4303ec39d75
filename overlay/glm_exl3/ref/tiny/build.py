"""Build checkpoint folders of every family.

What: one function per folder kind. `build_target` writes a packed family or the BF16 twin of one,
`build_drafter` the matching DFlash2 drafter. Why a `progress` callback: the demo builds its
checkpoint at first start and shows what happens.

What must stay true: the result depends on family, seed and geometry alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glm_exl3.ref.tiny import configs
from glm_exl3.ref.tiny.drafter import drafter_tensors
from glm_exl3.ref.tiny.folder import write_folder
from glm_exl3.ref.tiny.geometry import geometry
from glm_exl3.ref.tiny.recipe import RECIPES, Family
from glm_exl3.ref.tiny.target import target_tensors
from glm_exl3.ref.tiny.twin import dequantised_state_dict

Progress = Callable[[str], None]


def _processor() -> dict[str, dict[str, Any]]:
    return {"processor_config.json": configs.processor_config(geometry().vision)}


def _silent(_: str) -> None:
    return None


def build_target(
    folder: Path,
    family: Family,
    seed: int = 0,
    twin_of: Family = Family.TR3,
    progress: Progress = _silent,
) -> None:
    """Write the target's folder; `twin_of` names the packed family behind a BF16 twin."""
    if family is Family.BF16:
        with tempfile.TemporaryDirectory() as scratch:
            build_target(Path(scratch), twin_of, seed, progress=progress)
            build_twin(Path(scratch), folder, progress=progress)
        return
    progress(f"making the {family.value} tensors")
    tensors = target_tensors(family, geometry(), seed)
    quantization = configs.quantization(RECIPES[family], tensors)
    progress(f"writing {folder}")
    write_folder(folder, tensors, configs.target_config(geometry(), quantization), _processor())


def build_twin(
    packed: Path, folder: Path, *, mtp: bool = True, progress: Progress = _silent
) -> None:
    """Write the BF16 twin of an existing packed folder; without `mtp` it has no MTP layer."""
    progress(f"decoding {packed}")
    config = configs.target_config(geometry(), None)
    if not mtp:
        config["text_config"]["num_nextn_predict_layers"] = 0
    write_folder(folder, dequantised_state_dict(packed, mtp=mtp), config, _processor())


def build_drafter(
    folder: Path,
    family: Family,
    seed: int = 0,
    *,
    packed: bool = False,
    progress: Progress = _silent,
) -> None:
    """Write the DFlash2 drafter of a packed family's target, in BF16 or as EXL3 at 6 bits."""
    progress(f"making the drafter ({'EXL3, 6 bits' if packed else 'BF16'})")
    tensors, quantization = drafter_tensors(geometry(), family, seed, packed=packed)
    write_folder(folder, tensors, configs.draft_config(geometry(), quantization))
