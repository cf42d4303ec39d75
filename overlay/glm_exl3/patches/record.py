"""The record of one change to vLLM, and the fingerprint that ties it to the source it was written
for.

A patch replaces an attribute of an installed module; no file is edited. It is only right for source
it was read against, so each target carries a hash of its syntax tree: comments, docstrings and
layout may change, a statement may not. The hash is taken from the file without importing it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm_exl3.format.errors import GlmExl3Error

STAGES = ("import", "model")
_VERSION_FIELDS = ("ctx", "kind", "type_comment", "type_params")


@dataclass(frozen=True)
class Patch:
    """One change to vLLM.

    `targets` are `module:qualified.name` of the definitions the patch relies on; `stage` is
    `import` (every process) or `model` (before a model is built); `fingerprints` maps a vLLM
    version to the hash of each target; `off_switch` is the environment variable that leaves the
    patch out when set to 0; `risk` says what a wrong patch would do.
    """

    id: str
    summary: str
    targets: tuple[str, ...]
    stage: str
    applies_to: str
    fingerprints: Mapping[str, Mapping[str, str]]
    upstream: str
    remove_when: str
    off_switch: str
    risk: str
    apply: Callable[[], None] = field(compare=False)

    def drift(self, version: str, roots: Callable[[str], Path] | None = None) -> tuple[str, ...]:
        """Targets whose source is not the known one; all of them for an unknown version.

        `roots` finds the file of a module; by default the installed one.
        """
        known = self.fingerprints.get(version, {})
        return tuple(
            target for target in self.targets if known.get(target) != fingerprint(target, roots)
        )


def wrap(
    patch: str,
    holder: Any,
    name: str,
    wrapper: Callable[[Callable[..., Any]], Callable[..., Any]],
    copies: Iterable[str] = (),
) -> None:
    """Put `wrapper(original)` for `holder.name`, and where loaded modules `copies` hold the
    original; once per patch id."""
    original, mark = getattr(holder, name), f"glm_exl3_{patch}"
    if getattr(original, mark, False):
        return
    wrapped = wrapper(original)
    setattr(wrapped, mark, True)
    setattr(holder, name, wrapped)
    for copy in copies:
        loaded = sys.modules.get(copy)
        if getattr(loaded, name, None) is original:
            setattr(loaded, name, wrapped)


def module_file(module: str) -> Path:
    """The source file of an installed module, found without importing it or its package."""
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise _unreadable(module, "the package is not installed")
    base = Path(next(iter(spec.submodule_search_locations)))
    for candidate in (
        base.joinpath(*parts).with_suffix(".py"),
        base.joinpath(*parts, "__init__.py"),
    ):
        if candidate.is_file():
            return candidate
    raise _unreadable(module, "there is no such module")


def fingerprint(target: str, roots: Callable[[str], Path] | None = None) -> str:
    """Hash of the syntax tree of `module:qualified.name`, 16 hex digits; `absent` if it is gone."""
    module, _, name = target.partition(":")
    try:
        path = (roots or module_file)(module)
    except GlmExl3Error:
        return "absent"
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split(".") if name else ():
        found = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and child.name == part
        ]
        if not found:
            return "absent"
        node = found[-1]
    text = _canonical(_without_docstrings(node))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _canonical(value: object) -> str:
    """A syntax tree as text that does not depend on the Python version that parsed it.

    `ast.dump` prints fields that some versions have and others lack, even where they are empty.
    """
    if isinstance(value, ast.AST):
        fields = [
            f"{name}={_canonical(child)}"
            for name, child in ast.iter_fields(value)
            if name not in _VERSION_FIELDS and child not in (None, [])
        ]
        return f"{type(value).__name__}({','.join(fields)})"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    return repr(value)


def _without_docstrings(node: ast.AST) -> ast.AST:
    for child in ast.walk(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            continue
        first = child.body[0] if child.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            child.body = child.body[1:]
    return node


def _unreadable(module: str, reason: str) -> GlmExl3Error:
    return GlmExl3Error(
        code="patch-target",
        seen=f"{module}: {reason}",
        why="a patch relies on its source",
        fix="install the vLLM version that this plugin supports",
    )
