"""A checkpoint seen with its dense matrices recoded to EXL3.

The cache's headers take the place of the dense tensors in `Facts`, so everything behind them
(dispatch, cuts, completeness, kernels) sees an ordinary packed checkpoint; while loading, the
cache's tensors take the place of the dense ones in the stream. Nothing here runs unless
`GLM_EXL3_DENSE_RECODE` is exl3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from glm_exl3 import envs
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.headers import TensorEntry, read_header
from glm_exl3.format.metadata import CheckpointIndex
from glm_exl3.format.recode import GROUPS, Recode, dense_modules, encodable
from glm_exl3.format.recode_cache import cache_folder, check_complete, source_digest, units
from glm_exl3.log import logger
from glm_exl3.quant import edits
from glm_exl3.quant.facts import Facts, dense_modules_of

_log = logger(__name__)


def sources(facts: Facts, recode: Recode) -> dict[str, TensorEntry]:
    """Dense matrices of the groups that can be encoded, by module."""
    found = dense_modules_of(facts, recode)
    return {
        module: facts.index.tensors[f"{module}.weight"]
        for module, (_, shape) in found.items()
        if encodable(*shape)
    }


def folder_for(facts: Facts, recode: Recode) -> Path:
    """Where the recoded matrices of a checkpoint are or will be.

    The source is hashed over every group, so that groups can be added to a cache.
    """
    root = Path(envs.DENSE_CACHE.read() or facts.folder)
    return cache_folder(root, recode, _source(facts), edits.digest_entry())


_hashed: dict[int, tuple[Facts, str]] = {}


def _source(facts: Facts) -> str:
    """`source_digest` of all groups, read once per `Facts`: configurations are rebuilt often."""
    known = _hashed.get(id(facts))
    if known is None or known[0] is not facts:
        known = _hashed[id(facts)] = (facts, source_digest(_all_sources(facts)))
    return known[1]


def _all_sources(facts: Facts) -> dict[str, TensorEntry]:
    shapes = [(name, entry.shape) for name, entry in facts.index.tensors.items()]
    return {
        module: facts.index.tensors[f"{module}.weight"] for module in dense_modules(shapes, GROUPS)
    }


def with_recoded(facts: Facts, recode: Recode) -> Facts:
    """`facts` with packed matrices where the cache has them.

    Raises GlmExl3Error for a cache that is missing or incomplete.
    """
    if recode.scheme != "exl3":
        return facts
    dense = sources(facts, recode)
    if not dense:
        return facts
    folder = folder_for(facts, recode)
    made = check_complete(folder, units(dense), recode)
    tensors = {
        name: entry
        for name, entry in facts.index.tensors.items()
        if name.removesuffix(".weight") not in dense
    }
    for unit in made:
        tensors |= read_header(folder / unit.file)
    index = CheckpointIndex(facts.folder, tensors)
    for module in dense:
        if module not in index.modules:
            raise GlmExl3Error(
                code="recode-cache",
                seen=f"the files in {folder} do not hold {module}",
                why="the matrix would be missing",
                fix="delete that folder and run ./start.sh recode",
            )
    changed = {module: names for unit in made for module, names in unit.edits.items()}
    recoded = {module: changed.get(module, ()) for module in dense}
    _log.info("dense recode %s: %d matrices from %s", recode, len(recoded), folder)
    return replace(facts, index=index, modules=dict(index.modules), recoded=recoded)


def recoded_tensors(facts: Facts) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the recoded matrices, file by file."""
    from safetensors import safe_open

    files: dict[Path, list[str]] = {}
    for name, entry in facts.index.tensors.items():
        if name.rpartition(".")[0] in facts.recoded:
            files.setdefault(entry.file, []).append(name)
    for path in sorted(files):
        with safe_open(path, "pt") as file:
            for name in files[path]:
                yield name, file.get_tensor(name)
