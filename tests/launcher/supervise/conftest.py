"""Helpers are modules next to these tests; a launch of fake ranks that leaves nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from staged import RANK, Service, canaries  # noqa: E402


@pytest.fixture
def service(launcher, wait_for) -> Iterator[Service]:
    launcher.env["ENGINE_COMMAND"] = f"{sys.executable} {RANK}"
    service = Service(launcher)
    yield service
    for process in service.supervisors:
        process.kill()
        process.wait()
    stopped = launcher("stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert launcher.left_over() == []
    wait_for(lambda: canaries(launcher.state) == [])
