"""`python -m glm_launch.supervise`: look after the launch that runs, until it is stopped.

Exit codes as of the launcher: 0 the launch was stopped by a command, 3 nothing to look after or
looked after already, 5 given up, 130 ended by a signal.
"""

from __future__ import annotations

import io
import sys
from contextlib import AbstractContextManager
from typing import Any

from glm_launch.errors import ExitCode, LaunchError
from glm_launch.runners import PlannedRunner
from glm_launch.session import Session, open_session
from glm_launch.supervise.watchman import Watchman
from glm_launch.ui import Ui

LOG_S = 20.0


def watchman_of(session: Session) -> Watchman:
    """The supervisor of a session's state folder."""
    if isinstance(session.cluster.runner, PlannedRunner):
        session.cluster.runner.log_every_s = LOG_S

    def changing() -> AbstractContextManager[Any]:
        return session.backend.changing("restart")

    return Watchman(
        session.cluster, session.settings.secrets(), changing=changing,
        guarding=session.backend.guarding,
    )  # fmt: skip


def main() -> int:
    try:
        watchman = watchman_of(open_session(Ui(out=io.StringIO())))
        return ExitCode.OK if watchman.run() else ExitCode.UNHEALTHY
    except LaunchError as error:
        Ui().error(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(int(main()))
