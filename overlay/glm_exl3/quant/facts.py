"""What a checkpoint folder says about itself, read once per process from the safetensors headers.

The headers are the only source for bits, codebook and which modules are packed; configuration files
are never asked. Facts are cached by folder: quantisation configurations travel between processes
and are rebuilt often, the headers of a checkpoint do not change under a running server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from glm_exl3.format.errors import FormatError, GlmExl3Error
from glm_exl3.format.layout import MatrixLayout
from glm_exl3.format.metadata import CheckpointIndex, check_checkpoint
from glm_exl3.format.recode import Recode, check_groups, dense_modules, is_target


@dataclass(frozen=True)
class Facts:
    """Tensors and packed modules of one checkpoint folder.

    `recoded` are the packed modules that the checkpoint itself holds dense, with the edits that
    they were made with.
    """

    folder: Path
    index: CheckpointIndex
    modules: dict[str, MatrixLayout]
    recoded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def file_of(self, tensor: str) -> str | None:
        """The file that holds `tensor`, or None."""
        entry = self.index.tensors.get(tensor)
        return None if entry is None else str(entry.file)

    def shape_of(self, tensor: str) -> tuple[int, ...] | None:
        entry = self.index.tensors.get(tensor)
        return None if entry is None else tuple(entry.shape)

    def error(self, tensor: str, *, code: str, seen: str, why: str, fix: str) -> FormatError:
        """A FormatError about one tensor, with its file."""
        return FormatError(
            code=code, seen=seen, why=why, fix=fix, file=self.file_of(tensor), tensor=tensor
        )


def dense_modules_of(facts: Facts, recode: Recode) -> dict[str, tuple[str, tuple[int, int]]]:
    """What `recode` asks for in a checkpoint: module -> (group, (out, in)).

    Empty for the folder of a drafter. Raises GlmExl3Error for a group without a dense matrix.
    """
    shapes = [(name, entry.shape) for name, entry in facts.index.tensors.items()]
    if not any(is_target(name) for name, _ in shapes):
        return {}
    found = dense_modules(shapes, recode.groups)
    check_groups(recode, (group for group, _ in found.values()), str(facts.folder))
    return found


@lru_cache(maxsize=8)
def read_facts(folder: Path) -> Facts:
    """Facts of `folder`. Raises FormatError for everything its headers show to be wrong."""
    report = check_checkpoint(folder)
    return Facts(folder, CheckpointIndex.read(folder), dict(report.modules))


def find_folder(model: str, revision: str | None) -> Path:
    """The local folder of a model: a path, or a repository already in the Hugging Face cache.

    Raises GlmExl3Error when it is neither: nothing is downloaded behind the launcher's back.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise GlmExl3Error(
            code="checkpoint",
            seen=f"model {model!r} is neither a folder nor in the local Hugging Face cache",
            why="bits and codebooks are read from the tensors before the model is built",
            fix="download the checkpoint first (start.sh download) or pass its folder",
        ) from error
