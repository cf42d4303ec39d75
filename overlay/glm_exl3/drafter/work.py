"""Finished matrices on disk, so that a run that was killed anywhere goes on where it was.

Beside the final folder lies `NAME.partial`: `job.json` says what is being made of which bytes, and
every finished group of matrices is one file, complete as soon as it has its name. A partial folder
of another source or recipe is refused, not mixed in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from glm_exl3.format.durable import alone, sha256_of, write_whole
from glm_exl3.format.errors import GlmExl3Error

VERSION = 1


@dataclass(frozen=True)
class Order:
    """What is made: digests of the source's files, and the recipe's numbers."""

    source: dict[str, str]
    bits: int
    codebook: str
    seed: int
    synthetic: bool = True
    version: int = VERSION


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files that decide the result, by name."""
    names = ["config.json", *sorted(path.name for path in folder.glob("*.safetensors"))]
    return {name: sha256_of(folder / name) for name in names}


@dataclass(frozen=True)
class Bench:
    """The partial folder of one order."""

    folder: Path

    def part(self, module: str) -> Path:
        return self.folder / f"{module}.safetensors"

    def has(self, module: str) -> bool:
        return self.part(module).exists()

    def keep(self, module: str, tensors: Mapping[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        write_whole(self.part(module), lambda path: save_file(dict(tensors), path))

    def take(self, module: str) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return dict(load_file(self.part(module)))


@contextmanager
def at_bench(folder: Path, order: Order) -> Iterator[Bench]:
    """The partial folder, this process' own while the block runs.

    Raises GlmExl3Error when another process works there or what lies there is of another order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / "lock", lambda: _busy(folder)):
        wanted, record = asdict(order), folder / "job.json"
        if record.exists() and json.loads(record.read_text()) != wanted:
            raise GlmExl3Error(
                code="other-job",
                seen=f"{folder} holds matrices of another drafter or with other options",
                why="a drafter of mixed matrices would draft nonsense",
                fix=f"give the options of that run again, or remove {folder}",
            )
        text = json.dumps(wanted, indent=2, sort_keys=True) + "\n"
        if not record.exists():
            write_whole(record, partial(Path.write_text, data=text))
        yield Bench(folder)


def _busy(folder: Path) -> GlmExl3Error:
    return GlmExl3Error(
        code="busy",
        seen=f"another process packs into {folder}",
        why="two would write the same files",
        fix="wait for it",
    )
