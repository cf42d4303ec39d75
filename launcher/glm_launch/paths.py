"""Where things lie: the checkout, its caches, and the user's state folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ENV_FILE = REPOSITORY / ".env"
ENV_EXAMPLE = REPOSITORY / ".env.example"
MODELS = REPOSITORY / ".models"


def env_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The file with the user's settings; GLM_ENV_FILE names another one."""
    named = environ.get("GLM_ENV_FILE")
    return Path(named).expanduser() if named else ENV_FILE


def state_default(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder for state and logs by the XDG rules; it survives a reinstall of the checkout."""
    base = environ.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
    return Path(base) / "glm-exl3"
