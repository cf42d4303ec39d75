"""The table of replaced names against the source of the installed vLLM, without importing it."""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import files
from pathlib import Path

import pytest

from glm_exl3.cpu import replacements, table


@cache
def sources() -> dict[str, Path]:
    found = {}
    for file in files("vllm") or ():
        if file.suffix == ".py":
            found[str(file.with_suffix("")).replace("/", ".")] = Path(str(file.locate()))
    return found


def names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, (ast.If, ast.Try)):
            found |= names(node.body) | names(node.orelse)
    return found


def has(tree: ast.Module, attribute: str) -> bool:
    owner, _, member = attribute.partition(".")
    top = names(tree.body)
    if owner not in top:
        return False
    if not member:
        return True
    node = top[owner]
    while isinstance(node, ast.ClassDef):
        if member in names(node.body):
            return True
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in top]
        if not bases:
            return False
        node = top[bases[0]]
    return False


@pytest.mark.parametrize("entry", table.REPLACEMENTS, ids=lambda e: f"{e.module}.{e.attribute}")
def test_the_name_exists_in_vllm(entry):
    source = sources().get(entry.module) or sources().get(entry.module + ".__init__")
    assert source is not None, f"no module {entry.module}"
    attribute = entry.attribute.rpartition(".")[0] if entry.adds else entry.attribute
    assert has(ast.parse(source.read_text()), attribute)


@pytest.mark.parametrize(
    "entry",
    [entry for entry in table.REPLACEMENTS if "leaves.indexer" not in entry.by],
    ids=lambda e: e.by,
)
def test_the_replacement_exists(entry):
    assert replacements.resolve(entry.by) is not None


def test_every_name_is_replaced_once():
    targets = [(entry.module, entry.attribute) for entry in table.REPLACEMENTS]
    assert len(targets) == len(set(targets))


def test_every_entry_says_why():
    assert all(entry.why.endswith(".") and len(entry.why) > 20 for entry in table.REPLACEMENTS)
