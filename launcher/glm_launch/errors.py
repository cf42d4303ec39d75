"""Every way the launcher can fail, with its exit code.

One tree: an error carries a stable `code`, what was `seen` (with the value), `why` it matters and
the `fix`. A `Finding` is the same four facts as a value, so a check can return several at once and
the caller raises them together; the first finding never hides the second.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class ExitCode(enum.IntEnum):
    """What a shell sees; scripts may rely on these."""

    OK = 0
    BAD_CONFIGURATION = 2
    REFUSED = 3
    LAUNCH_FAILED = 4
    UNHEALTHY = 5
    INTERRUPTED = 130


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: `code` is stable, the rest are sentences for a person."""

    code: str
    seen: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.seen}\n  why: {self.why}\n  fix: {self.fix}"


class LaunchError(Exception):
    """Base of the tree; `findings` is never empty."""

    exit_code = ExitCode.LAUNCH_FAILED

    def __init__(self, *findings: Finding) -> None:
        super().__init__("\n".join(str(finding) for finding in findings))
        self.findings: tuple[Finding, ...] = findings


class ConfigurationError(LaunchError):
    """The settings are wrong; nothing was touched."""

    exit_code = ExitCode.BAD_CONFIGURATION


class RefusedError(LaunchError):
    """A check before the launch refused it; what runs was left alone."""

    exit_code = ExitCode.REFUSED


class LaunchFailedError(LaunchError):
    """The launch failed and everything it had started was stopped again."""

    exit_code = ExitCode.LAUNCH_FAILED


class UnhealthyError(LaunchError):
    """Ranks run, or should run, but do not answer."""

    exit_code = ExitCode.UNHEALTHY


class InterruptedLaunchError(LaunchError):
    """The user interrupted; everything this launch had started was stopped again."""

    exit_code = ExitCode.INTERRUPTED

    def __init__(self, signal_name: str = "SIGINT") -> None:
        super().__init__(
            Finding(
                "interrupted",
                f"interrupted by {signal_name}",
                "the launch was not complete, so its ranks were stopped",
                "start again when ready",
            )
        )


def raise_if_any(error: type[LaunchError], findings: Sequence[Finding]) -> None:
    """Raise `error` with all `findings`, or return when there are none."""
    if findings:
        raise error(*findings)
