"""Let vLLM find the plugin of this working tree where it is not installed.

vLLM finds plugins by the metadata of installed packages. On a machine that only has the repository
on its path, `paths` writes that metadata from pyproject.toml into a folder of its own.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUP = "vllm.general_plugins"
PARTS = ("overlay", "bench", "launcher", "ablit", "tests/engine")


def installed() -> bool:
    """Whether this interpreter's packages name the plugin."""
    return any(entry.value.startswith("glm_exl3.") for entry in entry_points(group=GROUP))


def write_metadata(folder: Path) -> Path:
    """The metadata of this tree's package in `folder`; returns `folder`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    made = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    made.mkdir(parents=True, exist_ok=True)
    head = ("Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}")
    (made / "METADATA").write_text("\n".join(head) + "\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (made / "entry_points.txt").write_text("\n".join(lines))
    return folder


def python_path(work: Path, more: Sequence[str] = ()) -> str:
    """PYTHONPATH for processes that run vLLM with this tree's plugin, and what is set already."""
    extra = [] if installed() else [str(write_metadata(work / "metadata"))]
    found = [*(str(ROOT / part) for part in PARTS), *more, *extra]
    return os.pathsep.join([*found, *filter(None, [os.environ.get("PYTHONPATH", "")])])
