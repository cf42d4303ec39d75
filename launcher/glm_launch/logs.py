"""Show and follow the logs of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from glm_launch.health import LogWatch, last_lines
from glm_launch.ui import Ui

POLL_S = 0.2


def show(
    ui: Ui,
    files: Mapping[str, Path],
    count: int,
    *,
    follow: bool,
    fetch: Callable[[], object] = lambda: None,
) -> None:
    """Print the last `count` lines of each file; with `follow`, go on until interrupted.

    `fetch` brings the files up to date and is called before each look.
    """
    fetch()
    prefix = len(files) > 1
    watch = LogWatch(list(files.values()))
    for name, path in files.items():
        seen = watch.new_lines(path) if follow else last_lines(path, count)
        for line in seen[-count:]:
            ui.line(f"{name}: {line}" if prefix else line)
    while follow:
        time.sleep(POLL_S)
        fetch()
        for name, path in files.items():
            for line in watch.new_lines(path):
                ui.line(f"{name}: {line}" if prefix else line)
