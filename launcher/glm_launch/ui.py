"""What a person sees: plain lines, coloured on a terminal, with a running clock while waiting.

Lines are the same everywhere; on a terminal without NO_COLOR they get colour, and the phase that is
under way gets a line that counts its seconds. Errors go to standard error.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from glm_launch.errors import LaunchError

_COLOURS = {"green": "32", "red": "31", "yellow": "33", "dim": "2", "bold": "1"}


class Ui:
    """Writes to one stream and, for errors, to another."""

    def __init__(self, out: IO[str] = sys.stdout, err: IO[str] = sys.stderr) -> None:
        self.out, self.err = out, err
        self.fancy = out.isatty() and not os.environ.get("NO_COLOR")
        self._clock: Any = None

    def colour(self, text: str, name: str) -> str:
        return f"\033[{_COLOURS[name]}m{text}\033[0m" if self.fancy else text

    def line(self, text: str = "") -> None:
        self.stop_clock()
        self.out.write(f"{text}\n")
        self.out.flush()

    def write(self, text: str) -> None:
        """Write a piece of a line, as a streamed answer comes in."""
        self.stop_clock()
        self.out.write(text)
        self.out.flush()

    def warn(self, text: str) -> None:
        """A remark on standard error, so that JSON on standard output stays JSON."""
        self.stop_clock()
        self.err.write(f"{self.colour('warning:', 'yellow')} {text}\n")
        self.err.flush()

    def error(self, error: LaunchError) -> None:
        """Every finding of an error, with why and fix."""
        self.stop_clock()
        for finding in error.findings:
            label = self.colour(f"error [{finding.code}]:", "red")
            self.err.write(f"{label} {finding}\n")
        self.err.flush()

    def clock(self, text: str) -> None:
        """Show `text` with a running clock until the next line; nothing without a terminal."""
        self.stop_clock()
        if not self.fancy:
            return
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._clock = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            console=Console(file=self.out), transient=True,
        )  # fmt: skip
        self._clock.add_task(text, total=None)
        self._clock.start()

    def stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.stop()
            self._clock = None

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Aligned columns; no borders, so that it can be cut and pasted."""
        cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        for index, row in enumerate(cells):
            padded = zip(row, widths, strict=True)
            text = "  ".join(cell.ljust(width) for cell, width in padded).rstrip()
            self.line(self.colour(text, "bold") if index == 0 else text)


class PhaseLines:
    """One line per phase of a launch: when it began and how long it took the last time."""

    def __init__(self, ui: Ui, before: Mapping[str, float]) -> None:
        self.ui, self.before = ui, before
        self.begin = time.monotonic()
        self._order = sorted(before, key=lambda name: before[name])

    def expected(self, name: str) -> str:
        """How long this phase took the last time, in words; empty when unknown."""
        if name not in self.before:
            return ""
        later = [
            self.before[other] for other in self._order if self.before[other] > self.before[name]
        ]
        return f", {later[0] - self.before[name]:.0f} s the last time" if later else ""

    def __call__(self, name: str, elapsed: float) -> None:
        self.ui.line(f"[{elapsed:6.1f} s] {name}{self.expected(name)}")
        self.ui.clock(name)

    def ready(self, elapsed: float) -> None:
        self.ui.line(f"[{elapsed:6.1f} s] {self.ui.colour('READY', 'green')}")
