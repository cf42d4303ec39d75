"""Fixtures of the engine tests: tiny checkpoints, made once, and runs of engine configurations."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import forked
from equivalence import Line

HERE = Path(__file__).parent
START_TIMEOUT_S = 420
PROMPT_LENGTHS = (3, 9, 17, 33, 70, 150, 400, 700)
VOCABULARY = (64, 1800)

Run = Callable[..., dict[str, Any]]

MINIATURE = HERE.parents[1] / "bench" / "nano" / "model"
OPENINGS = (
    "The gzip module provides a simple interface to compress and decompress files.",
    'def read_lines(path):\n    """Return the lines of a file."""\n',
    "json.dumps returns a",
    "Exceptions are raised when",
    "The following example shows how to use a context manager:\n\n",
    "class Stack:\n    def __init__(self):\n",
    "A list comprehension consists of brackets containing an expression followed by",
    "To open a socket and listen for connections, call",
)


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random token ids, in one fixed order per seed."""
    generator = random.Random(seed)
    return [[generator.randrange(*VOCABULARY) for _ in range(length)] for length in lengths]


def openings() -> list[list[int]]:
    """Beginnings of text for the trained miniature, as token ids."""
    tokenizer = Tokenizer.from_file(str(MINIATURE / "tr3" / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in OPENINGS]


def make_checkpoint(family: str, out: Path, *arguments: str) -> Path:
    """A tiny checkpoint, made by the product's own command."""
    command = [sys.executable, "-m", "glm_exl3.ref.tiny", "--family", family]
    subprocess.run([*command, "--out", str(out), *arguments], check=True)
    return out


def perform(
    program: str,
    job: dict[str, Any],
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
    result: str = "result.json",
) -> Path:
    """Run a program of this folder on `job` in a process of its own; its result's file."""
    job_path, result_path, log = folder / "job.json", folder / result, folder / "log"
    job_path.write_text(json.dumps(job))
    argv = (str(HERE / program), str(job_path), str(result_path))
    status = forked.run(argv, {**os.environ, **(env or {})}, log, timeout_s)
    assert status == 0, log.read_text(errors="replace")[-6000:]
    return result_path


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`tr3` and `full`, and for each a DFlash2 drafter under `<family>-drafter`."""
    root = tmp_path_factory.mktemp("checkpoints")
    folders: dict[str, Path] = {}
    for family in ("tr3", "full"):
        drafter = root / f"{family}-drafter"
        folders[family] = make_checkpoint(family, root / family, "--drafter", str(drafter))
        folders[f"{family}-drafter"] = drafter
    return folders


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run_engine(engine, prompts, max_tokens, reference=..., repeat=..., env=...)` -> result."""

    def run(
        engine: dict[str, Any],
        asked: list[list[int]],
        max_tokens: int,
        *,
        env: dict[str, str] | None = None,
        **job: Any,
    ) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("engine")
        job = {"engine": engine, "prompts": asked, "max_tokens": max_tokens, **job}
        return json.loads(perform("in_process.py", job, folder, env=env).read_text())

    return run


@pytest.fixture(scope="session")
def references(checkpoints: dict[str, Path], run_engine: Run) -> Callable[[str], dict[str, Any]]:
    """One undrafted TP 1 run per tiny family, shared by every comparison."""

    @cache
    def reference(family: str) -> dict[str, Any]:
        engine = {"model": str(checkpoints[family]), "enable_prefix_caching": False}
        return run_engine(engine, prompts(), 32)

    return reference


@pytest.fixture(scope="session")
def miniature_references(run_engine: Run) -> Callable[[str], list[Line]]:
    """Greedy text of the trained miniature at TP 1, per family."""

    @cache
    def reference(family: str) -> list[Line]:
        engine = {"model": str(MINIATURE / family), "enable_prefix_caching": False}
        lines = run_engine(engine, openings(), 32)["lines"]
        return [Line(**{key: tuple(value) for key, value in line.items()}) for line in lines]

    return reference
