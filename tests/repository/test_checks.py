"""The static checks: formatter, linter, types, direction of imports, shell, sizes, wording."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SOURCES = ("overlay", "launcher", "bench", "ablit", "tests", "docker")


def tracked(*suffixes: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    paths = [ROOT / name for name in listed]
    return [path for path in paths if path.is_file() and path.suffix in suffixes]


def run_tool(*arguments: str) -> None:
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("arguments", [("format", "--check"), ("check",)], ids=["format", "lint"])
def test_ruff(arguments: tuple[str, ...]) -> None:
    run_tool(str(BIN / "ruff"), *arguments, ".")


def test_types() -> None:
    run_tool(str(BIN / "mypy"))


def test_direction_of_imports() -> None:
    run_tool(str(BIN / "lint-imports"))


def test_shell_scripts() -> None:
    scripts = [str(path) for path in tracked(".sh")] + [str(ROOT / ".ci" / "run")]
    run_tool(str(BIN / "shellcheck"), *scripts)
    run_tool(str(BIN / "shfmt"), "-d", "-i", "4", *scripts)


def test_files_and_functions_stay_short() -> None:
    long: list[str] = []
    for path in tracked(".py", ".cu", ".cuh", ".h", ".cpp"):
        if path.relative_to(ROOT).parts[0] not in SOURCES:
            continue
        text = path.read_text()
        lines = text.count("\n")
        if lines > MAX_FILE_LINES:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        if path.suffix == ".py":
            long += [f"{path.relative_to(ROOT)}:{entry}" for entry in long_functions(text)]
    assert not long, "\n".join(long)


def long_functions(text: str) -> list[str]:
    functions = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [
        f"{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in functions
        if node.end_lineno and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]


def test_start_script_is_short() -> None:
    assert (ROOT / "start.sh").read_text().count("\n") < 120


def test_nothing_names_a_build_machine() -> None:
    forbidden = re.compile(r"(?<![\w.])/(?:work|root)/|\bhelper-\d|\bsub-?agent\b", re.IGNORECASE)
    hits = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked(".py", ".md", ".sh", ".toml", ".yaml", ".json", ".txt", ".cu", ".cuh")
        if path != Path(__file__)
        for match in [forbidden.search(path.read_text(errors="replace"))]
        if match
    ]
    assert not hits, "\n".join(hits)


def test_importing_the_plugin_package_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, glm_exl3, glm_exl3.format.layout, glm_exl3.format.sharding, "
        "glm_exl3.format.metadata; "
        "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    run_tool(sys.executable, "-c", code)
