"""Run a callback just before or just after a module is imported.

What: `before_import(name, callback)` and `after_import(name, callback)` for modules that may or may
not be loaded yet. Why this shape: replacing a name inside vLLM must not import vLLM modules that a
process does not need (the API server never loads the model runner, and each import costs start-up
time), so a replacement waits until its module is loaded by whoever needs it.

What must stay true: a callback runs at most once; an exception in a callback is the exception of
the `import` statement, so a failed replacement cannot go unnoticed. The finder never resolves a
module itself: it hands over to the finders behind it and wraps their loader.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Before = Callable[[], None]
After = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """Delegate to `inner`, then run the callbacks that wait for the module."""

    def __init__(self, inner: importlib.abc.Loader, callbacks: list[After]) -> None:
        self.inner = inner
        self.callbacks = callbacks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self.inner
            module.__loader__ = self.inner
        self.inner.exec_module(module)
        for callback in self.callbacks:
            callback(module)


class _Finder(importlib.abc.MetaPathFinder):
    """The one entry of this module in `sys.meta_path`."""

    def __init__(self) -> None:
        self.before: dict[str, list[Before]] = {}
        self.after: dict[str, list[After]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for callback in self.before.pop(fullname, []):
            callback()
        callbacks = self.after.pop(fullname, None)
        if callbacks is None:
            return None
        spec = self._next_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            self.after[fullname] = callbacks
            return spec
        spec.loader = _Loader(spec.loader, callbacks)
        return spec

    def _next_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        position = sys.meta_path.index(self) + 1
        for finder in sys.meta_path[position:]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


_FINDER = _Finder()


def _finder() -> _Finder:
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    return _FINDER


def before_import(name: str, callback: Before) -> bool:
    """Run `callback` before module `name` is first imported; False when it is loaded already."""
    if name in sys.modules:
        return False
    _finder().before.setdefault(name, []).append(callback)
    return True


def after_import(name: str, callback: After) -> None:
    """Run `callback(module)` once module `name` is loaded, at once when it is loaded already."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    _finder().after.setdefault(name, []).append(callback)
