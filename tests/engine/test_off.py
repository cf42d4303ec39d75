"""With recode, ablit and steering off, the logits are those of the plugin before it had them.

The plugin of the last commit without any of the three, the parent of the one that added `FIRST`, is
checked out beside this one and answers the same prompts. Needs the repository's history.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import HERE, MINIATURE, openings, prompts

pytestmark = [pytest.mark.engine, pytest.mark.long]
ROOT = Path(__file__).parents[2]
FIRST = "overlay/glm_exl3/quant/edits.py"
OFF = {"GLM_EXL3_DENSE_RECODE": "off", "GLM_EXL3_ABLIT": "off", "GLM_EXL3_STEER_VECTOR": ""}


def git(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(ROOT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package of the commit before."""
    folder = tmp_path_factory.mktemp("before") / "tree"
    added = git("log", "--diff-filter=A", "--format=%H", "--", FIRST)
    if not added.stdout:
        pytest.skip(f"no history with {FIRST} here: {added.stderr.strip()}")
    done = git("worktree", "add", "--detach", folder, f"{added.stdout.split()[-1]}^")
    if done.returncode:
        pytest.skip(f"no history before {FIRST} here: {done.stderr.strip()}")
    yield folder / "overlay"
    git("worktree", "remove", "--force", folder).check_returncode()


def logits(package: Path, folder: Path, env: dict[str, str]) -> tuple[list[Any], dict[str, Any]]:
    """Arrays and facts of a process that imports the plugin from `package`."""
    folder.mkdir()
    job, result = folder / "job.json", folder / "result.npz"
    asked = [*openings()[:4], prompts((150,))[0], prompts((700,))[0]]
    engine = {"model": str(MINIATURE / "tr3")}
    job.write_text(json.dumps({"engine": engine, "prompts": asked, "max_tokens": 8}))
    program = [sys.executable, str(HERE / "raw_logits.py"), str(job), str(result)]
    environment = {**os.environ, "PYTHONPATH": str(package), **env}
    done = subprocess.run(
        program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    with np.load(result) as file:
        facts = json.loads(str(file["facts"]))
        arrays = [file[str(number)] for number in range(len(file.files) - 1)]
    assert Path(facts["package"]).is_relative_to(package), facts["package"]
    return arrays, facts


def test_off_is_not_built_in(before: Path, tmp_path: Path) -> None:
    wanted, old = logits(before, tmp_path / "before", {})
    found, new = logits(ROOT / "overlay", tmp_path / "now", OFF)
    assert new["tokens"] == old["tokens"]
    assert [array.shape for array in found] == [array.shape for array in wanted]
    differing = [int((a != b).sum()) for a, b in zip(found, wanted, strict=True)]
    assert not any(differing), differing
    assert sum(array.size for array in found) > 900 * 1920
