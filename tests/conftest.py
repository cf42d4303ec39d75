"""Rules for the whole suite.

Under CI a skip is a failure unless its reason names hardware that cannot be installed, so a green
run cannot hide a test that quietly stopped running.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

HERE = Path(__file__).parent
LAB = "tests/lab"
LONGEST_FIRST = ("engine", "lab")
ALLOWED_SKIPS = ("needs an NVIDIA GPU", "the lab cannot run on this machine")

settings.register_profile(
    "repository",
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repository")

# A shell's background job ignores SIGINT and so would every process started here.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "long" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
    items.sort(key=lambda item: _place(item.path))


def _place(path: Path) -> int:
    folder = path.relative_to(HERE).parts[0] if HERE in path.parents else ""
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


class Files(LoadFileScheduling):
    """A file's tests run in one process, one after the other, and so does the whole lab."""

    def _split_scope(self, nodeid: str) -> str:
        return LAB if nodeid.startswith(f"{LAB}/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Files:
    return Files(config, log)


def _is_forbidden(report: pytest.TestReport | pytest.CollectReport) -> bool:
    return (
        bool(os.environ.get("CI"))
        and report.skipped
        and not hasattr(report, "wasxfail")
        and not any(allowed in report.longreprtext for allowed in ALLOWED_SKIPS)
    )


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if _is_forbidden(report):
        report.longrepr = f"skipped although it could have run: {report.longreprtext}"
        report.outcome = "failed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report)
    return report


def _minutes(terminalreporter: pytest.TerminalReporter) -> dict[str, float]:
    """Minutes spent in each test file, with its fixtures, longest first."""
    spent: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                spent[file] = spent.get(file, 0.0) + report.duration / 60
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    slow = {file: spent for file, spent in _minutes(terminalreporter).items() if spent >= 0.5}
    if slow:
        terminalreporter.section("minutes by file")
        for file, spent in slow.items():
            terminalreporter.line(f"{spent:5.1f}  {file}")


@pytest.fixture(scope="session")
def said() -> Callable[[subprocess.Popen[str], str], None]:
    """Waits for a line of a process; what it says later stays to be read."""

    def wait(process: subprocess.Popen[str], text: str) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if text in line:
                return
        raise AssertionError(f"never said: {text}")

    return wait
