"""Engines start without compiling every shape first: Python imports this where it is on the path.

vLLM's warm-up of all shapes takes minutes on a machine without its caches. Here the few steps that
allocate what graphs may point at run in its place; other shapes compile when they are first met.
Only for measurements that warm up themselves: a server needs the whole warm-up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MODULE = "vllm.v1.worker.gpu_worker"


def patch(module: ModuleType) -> None:
    """Give `module` a warm-up without the registry."""
    whole: Callable[..., None] = module.kernel_warmup

    def kernel_warmup(worker: Any, *arguments: Any, **named: Any) -> None:
        from vllm.v1.worker.gpu.warmup import warmup_kernels

        worker.vllm_config.kernel_config.enable_jit_warmup = False
        whole(worker, *arguments, **named)
        if worker.use_v2_model_runner:
            warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)

    module.kernel_warmup = kernel_warmup  # type: ignore[attr-defined]


class Finder(MetaPathFinder):
    """Patches the worker's module right after it ran."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
