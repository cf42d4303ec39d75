"""Replace names inside vLLM, each declared in a typed record, when their module is loaded.

What: `Replacement` says which name of which vLLM module is replaced by what, and why; `install`
arranges that it happens. Why this shape: the CPU engine leans on private names of one vLLM version.
A name that vanished must be one clear error that names it, not a silent fall-back to code that
cannot run here, so every name is declared and checked before it is replaced.

What must stay true: a replacement is applied once, right after its module is loaded and before
anybody can import from it; where the module was loaded earlier, other vLLM modules that copied a
replaced function get the new one as well. `by` is resolved only at that time.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from glm_exl3.cpu.imports import after_import
from glm_exl3.format.errors import GlmExl3Error

_MARK = "_glm_exl3_cpu"


class EngineDriftError(GlmExl3Error):
    """A vLLM name that the CPU engine replaces does not exist."""


@dataclass(frozen=True)
class Replacement:
    """One replaced name.

    module: vLLM module; attribute: name in it, `Class.name` for a member.
    by: `module:name` of what takes its place; with `wraps` that is called with the original and
    returns what takes its place; with `adds` the owner must exist and the name need not. why: what
    would happen without it.
    """

    module: str
    attribute: str
    by: str
    why: str
    wraps: bool = False
    adds: bool = False


class Kernel:
    """A function called like a Triton kernel, `kernel[grid](...)`.

    The grid and the launch options are ignored.
    """

    OPTIONS = ("num_warps", "num_stages")

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        for option in self.OPTIONS:
            kwargs.pop(option, None)
        self.function(*args, **kwargs)


def resolve(path: str) -> Any:
    """The object that `module:name` names."""
    module, _, name = path.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def vllm_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm")
    except PackageNotFoundError:
        return "unknown"


def _missing(entry: Replacement) -> EngineDriftError:
    return EngineDriftError(
        code="cpu-engine-drift",
        seen=f"vLLM {vllm_version()} has no {entry.module}.{entry.attribute}.",
        why=f"The CPU engine replaces it: {entry.why}",
        fix="Install the vLLM version that this release pins, or set GLM_EXL3_PLATFORM=off.",
    )


def apply(entry: Replacement, module: ModuleType, holders: Iterable[ModuleType] = ()) -> None:
    """Replace one name in its loaded module and wherever `holders` copied it."""
    owner: Any = module
    *path, name = entry.attribute.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    if owner is not None and entry.adds:
        setattr(owner, name, resolve(entry.by))
        return
    if owner is None or not hasattr(owner, name):
        raise _missing(entry)
    raw = inspect.getattr_static(owner, name)
    original = getattr(owner, name)
    if getattr(original, _MARK, None) == entry.by:
        return
    new = resolve(entry.by)
    if entry.wraps:
        new = new(original)
    if callable(new) and not isinstance(new, (type, staticmethod, classmethod)):
        _mark(new, entry.by)
    for holder in holders:
        for key, value in list(vars(holder).items()):
            if value is original and not isinstance(value, (bool, int, str)):
                setattr(holder, key, new)
    if isinstance(raw, (staticmethod, classmethod)):
        new = type(raw)(new)
    setattr(owner, name, new)


def _mark(function: Any, value: str) -> None:
    if hasattr(function, "__dict__"):
        setattr(function, _MARK, value)


def install(entries: Iterable[Replacement]) -> None:
    """Apply every entry now where its module is loaded, else when it is."""
    by_module: dict[str, list[Replacement]] = defaultdict(list)
    for entry in entries:
        by_module[entry.module].append(entry)
    for name, group in by_module.items():
        loaded = name in sys.modules
        after_import(name, _applier(group, loaded))


def _applier(group: list[Replacement], loaded: bool) -> Callable[[ModuleType], None]:
    def run(module: ModuleType) -> None:
        holders = [m for n, m in list(sys.modules.items()) if n.startswith("vllm.")]
        for entry in group:
            apply(entry, module, holders if loaded else ())

    return run
