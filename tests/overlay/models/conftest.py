"""Tiny checkpoints and the model of one, built and loaded by vLLM itself at one rank.

No engine starts: a configuration, vLLM's model loader and a gloo group of one are enough to see
whether a checkpoint loads.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def environment_kept() -> Iterator[None]:
    """vLLM's configuration sets variables such as LD_PRELOAD, which later tests would inherit."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny checkpoint of a family, written once."""
    from glm_exl3.ref.tiny.build import build_target
    from glm_exl3.ref.tiny.recipe import Family

    root = tmp_path_factory.mktemp("tiny")

    def folder(family: str) -> Path:
        path = root / family
        if not path.exists():
            build_target(path, Family(family))
        return path

    return folder


@pytest.fixture
def copied(pristine: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a tiny checkpoint that a test may damage."""

    def folder(family: str) -> Path:
        from glm_exl3.quant.facts import read_facts

        target = tmp_path / family
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(pristine(family), target)
        read_facts.cache_clear()
        return target

    return folder


@pytest.fixture
def drafter(tmp_path: Path) -> Callable[..., Path]:
    """Folder of a drafter for the `full` family."""
    from glm_exl3.ref.tiny.build import build_drafter
    from glm_exl3.ref.tiny.recipe import Family

    def folder(*, packed: bool) -> Path:
        path = tmp_path / "drafter"
        build_drafter(path, Family.FULL, packed=packed)
        return path

    return folder


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's process groups with a single member."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    patch = pytest.MonkeyPatch()
    patch.setattr(torch.accelerator, "empty_cache", lambda: None)
    rendezvous = tmp_path_factory.mktemp("gloo") / "store"
    with environment_kept(), set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()
    patch.undo()


@pytest.fixture
def build(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Build and load the model of a folder; `draft` builds the speculator's model instead."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    def make(folder: Path, *, draft: bool = False, **arguments: Any) -> Any:
        settings = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "language_model_only": True,
        }
        with environment_kept():
            config = EngineArgs(model=str(folder), **(settings | arguments)).create_engine_config()
        draft_config = config.speculative_config.draft_model_config if draft else None
        with set_current_vllm_config(config):
            return get_model(vllm_config=config, model_config=draft_config)

    return make
