"""The systemd user unit that looks after a launch again after a reboot.

`python -m glm_launch.supervise.unit` prints it. Pure but for that. The unit never starts a launch
that was stopped: the supervisor ends with 3 when nothing should run, and systemd leaves it at that.
"""

from __future__ import annotations

import sys
from pathlib import Path

from glm_launch.errors import ExitCode
from glm_launch.paths import REPOSITORY

NAME = "glm-exl3.service"


def render(python: str = sys.executable, folder: Path = REPOSITORY) -> str:
    """The text of the unit."""
    final = " ".join(str(int(code)) for code in (
        ExitCode.BAD_CONFIGURATION, ExitCode.REFUSED, ExitCode.UNHEALTHY, ExitCode.INTERRUPTED,
    ))  # fmt: skip
    paths = ":".join(str(folder / part) for part in ("launcher", "bench", "overlay"))
    return f"""# ~/.config/systemd/user/{NAME}, then: systemctl --user enable {NAME}
# and, so that it runs before anybody logs in: loginctl enable-linger
[Unit]
Description=Looks after the GLM launch of {folder}

[Service]
WorkingDirectory={folder}
Environment=PYTHONPATH={paths}
ExecStart={python} -m glm_launch.supervise
Restart=on-failure
RestartSec=10
RestartPreventExitStatus={final}
SuccessExitStatus={int(ExitCode.INTERRUPTED)}
KillMode=mixed
TimeoutStopSec=120

[Install]
WantedBy=default.target
"""


if __name__ == "__main__":
    sys.stdout.write(render())
