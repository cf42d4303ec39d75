"""Rules for the whole suite.

Under CI a skip is a failure unless its reason names hardware that cannot be installed, so a green
run cannot hide a test that quietly stopped running.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

ALLOWED_SKIPS = ("needs an NVIDIA GPU",)

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


def _reason(report: pytest.TestReport) -> str:
    longrepr = report.longrepr
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)


def _forbidden_skips(terminalreporter: object) -> list[str]:
    reports = getattr(terminalreporter, "stats", {}).get("skipped", [])
    return [
        f"{report.nodeid}: {_reason(report)}"
        for report in reports
        if not any(allowed in _reason(report) for allowed in ALLOWED_SKIPS)
    ]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and exitstatus == 0 and _forbidden_skips(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    forbidden = _forbidden_skips(terminalreporter) if os.environ.get("CI") else []
    if forbidden:
        terminalreporter.section("skipped although it could have run")
        for line in forbidden:
            terminalreporter.line(line)
