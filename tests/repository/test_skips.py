"""Under CI a test that could have run must not skip itself, and the summary line says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
IN_A_TEST = "def test_one():\n    pytest.skip({reason!r})\n"
BY_A_MARK = "@pytest.mark.skip({reason!r})\ndef test_one():\n    pass\n"
OF_A_MODULE = "pytest.skip({reason!r}, allow_module_level=True)\n"
IN_A_FIXTURE = (
    "@pytest.fixture\ndef given():\n    pytest.skip({reason!r})\ndef test_one(given):\n    pass\n"
)
EVERYWHERE = [IN_A_TEST, BY_A_MARK, OF_A_MODULE, IN_A_FIXTURE]


def summary(folder: Path, test: str, reason: str, ci: str) -> tuple[int, str]:
    shutil.copy(CONFTEST, folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text("import pytest\n" + test.format(reason=reason))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), str(folder)],
        cwd=folder, env={"CI": ci, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines()[-1]


@pytest.mark.parametrize("test", EVERYWHERE, ids=["call", "mark", "module", "fixture"])
def test_ci_counts_a_skip_as_a_failure(tmp_path: Path, test: str) -> None:
    code, line = summary(tmp_path, test, "shapes that do not exist", "true")
    assert code != 0
    assert "1 failed" in line or "1 error" in line


@pytest.mark.parametrize(("ci", "reason"), [("true", "needs an NVIDIA GPU"), ("", "any other")])
@pytest.mark.parametrize("test", EVERYWHERE, ids=["call", "mark", "module", "fixture"])
def test_other_skips_are_skips(tmp_path: Path, test: str, ci: str, reason: str) -> None:
    code, line = summary(tmp_path, test, reason, ci)
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert "1 skipped" in line
