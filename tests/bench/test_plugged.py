"""A process that only has the tree on its path finds the plugin by the written metadata."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from e2e import plugged


def test_written_metadata_has_the_projects_entry_points(tmp_path: Path) -> None:
    folder = plugged.write_metadata(tmp_path / "metadata")
    project = tomllib.loads((plugged.ROOT / "pyproject.toml").read_text())["project"]
    code = (
        "from importlib.metadata import distributions; import sys\n"
        "for one in distributions(path=sys.argv[1:]):\n"
        "    print(one.name, one.version, [(e.group, e.name, e.value) for e in one.entry_points])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    wanted = [
        (group, name, value)
        for group, entries in project["entry-points"].items()
        for name, value in entries.items()
    ]
    assert done.stdout == f"{project['name']} {project['version']} {wanted}\n"


def test_an_installed_plugin_needs_no_metadata(tmp_path: Path) -> None:
    assert plugged.installed()
    assert str(tmp_path) not in plugged.python_path(tmp_path)
