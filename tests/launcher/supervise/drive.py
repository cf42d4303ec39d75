"""The supervisor's process with other limits: drive.py '{"stall_s": 4}' [kill-PHASE]

With `kill-PHASE` it kills itself as soon as it wrote that phase down.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys

from glm_launch.errors import LaunchError
from glm_launch.session import open_session
from glm_launch.supervise import __main__ as program
from glm_launch.supervise import eyes
from glm_launch.supervise.troubles import Rules
from glm_launch.ui import Ui


def main() -> int:
    watchman = program.watchman_of(open_session(Ui(out=io.StringIO())))
    limits = json.loads(sys.argv[1])
    if "delays_s" in limits:
        limits["delays_s"] = tuple(limits["delays_s"])
    watchman.rules = Rules(**limits)
    eyes.CANARY_OPTIONS, eyes.TIMEOUT_S = ("--idle-s", "3", "--answer-s", "2"), 2.0
    eyes.RANK_S, eyes.COUNTERS_S, eyes.HEALTH_S = 0.3, 0.5, 1.0
    save = watchman.desk.save

    def save_and_die(saved) -> None:
        save(saved)
        if f"kill-{saved.phase}" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)

    watchman.desk.save = save_and_die
    try:
        return 0 if watchman.run() else 5
    except LaunchError as error:
        Ui().error(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
