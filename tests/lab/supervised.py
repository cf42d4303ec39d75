"""The supervisor of a launch of fake ranks as a process: supervised.py < REQUEST

REQUEST is `Fakes.as_json` and the supervisor's rules, as one JSON object; it holds the key, so it
is no argument. Exit codes: 0 stopped, 5 gave up, 7 refused, 8 ended by a signal.
"""

from __future__ import annotations

import json
import sys

from fakes import Fakes

from glm_launch.errors import InterruptedLaunchError, LaunchError
from glm_launch.supervise.desk import Desk
from glm_launch.supervise.troubles import Rules
from glm_launch.supervise.watchman import Watchman


def main() -> int:
    request = json.load(sys.stdin)
    fakes = Fakes.from_json(request["fakes"])
    limits = request["limits"]
    rules = Rules(**limits | {"delays_s": tuple(limits["delays_s"])})
    cluster = fakes.cluster
    shells = cluster.runner.shells
    try:
        return 0 if Watchman(cluster, fakes.secrets, rules, lambda _: shells).run() else 5
    except InterruptedLaunchError:
        return 8
    except LaunchError as error:
        Desk(fakes.folder).say(f"refused: {error}")
        return 7


if __name__ == "__main__":
    sys.exit(main())
