"""Settings of weight edits that do not go together. Pure: settings in, findings out."""

from __future__ import annotations

import re

from glm_launch.errors import Finding
from glm_launch.settings import Settings
from glm_launch.settings_edits import ALPHA_THAT_BREAKS

_COMMIT = re.compile(r"^[0-9a-f]{40}$")


def ablit(settings: Settings) -> list[Finding]:
    """A method has what it needs; neither stands in for the other."""
    if not settings.ABLIT:
        return []
    if settings.ABLIT_METHOD == "proj":
        if settings.ABLIT_ALPHA:
            return []
        return [
            Finding(
                "ablit-alpha",
                "ABLIT_METHOD=proj with ABLIT_ALPHA=0",
                "nothing would be edited",
                "set ABLIT_ALPHA, or leave ABLIT empty",
            )
        ]
    if not settings.ABLIT_DONOR:
        return [
            Finding(
                "no-donor",
                f"ABLIT=1 with ABLIT_METHOD={settings.ABLIT_METHOD} and no ABLIT_DONOR",
                "a transplant needs the repository whose tensors are put in place",
                "set ABLIT_DONOR and ABLIT_DONOR_REVISION, then ./start.sh ablit fetch; or "
                "ABLIT_METHOD=proj",
            )
        ]
    if _COMMIT.match(settings.ABLIT_DONOR_REVISION):
        return []
    return [
        Finding(
            "donor-revision",
            f"ABLIT_DONOR_REVISION={settings.ABLIT_DONOR_REVISION or '(empty)'} is no commit",
            "a name may mean other weights tomorrow",
            "./start.sh ablit fetch tells the commit of today",
        )
    ]


def steering(settings: Settings) -> list[Finding]:
    """A vector with a strength that the model bears."""
    found = []
    if settings.STEER_SHA256 and not settings.STEER_VECTOR:
        found.append(
            Finding(
                "steer-hash",
                "STEER_SHA256 without STEER_VECTOR",
                "there is no file that could have it",
                "set STEER_VECTOR, or leave both empty",
            )
        )
    if not settings.STEER_VECTOR or settings.STEER_FORCE:
        return found
    if abs(settings.STEER_ALPHA) >= ALPHA_THAT_BREAKS:
        found.append(
            Finding(
                "steer-alpha",
                f"STEER_ALPHA={settings.STEER_ALPHA:g}",
                f"from {ALPHA_THAT_BREAKS} on this model is known to answer with garbled text",
                "use less (2.0 was measured by the author of the format), or STEER_FORCE=1",
            )
        )
    return found
